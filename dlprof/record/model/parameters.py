"""What becomes of a model's parameters that training does not need: gradients that are dropped, subnormal values."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dlprof.record.captured import capture_test
from dlprof.record.model.names import alive, children_of, class_of, parameters_of, unwrapped

# So many steps of optimizers are looked at, and so many optimizers.
_MOST_LOOKS, _MOST_OPTIMIZERS = 2000, 8


@dataclass(slots=True)
class _Seen:
    mark: tuple[int, int] | None = None  # the gradient's identity and version at the last look
    waiting: weakref.ref[Any] | None = None  # a gradient that another optimizer's passes have left
    passes: int = 0  # of those that left it
    dropped: int = 0
    used: int = 0


class Dropped:
    """Follows the gradients of a job with several optimizers.

    `through`: the addresses of models that gradients were asked of for their input: what is before them is trained
    through them.
    """

    def __init__(self) -> None:
        self.through: set[int] = set()
        self._seen: dict[int, _Seen] = {}
        self._looks = 0

    def see(self, steps: Any, optimizers: Iterable[weakref.ref[Any]]) -> None:
        """Look at every optimizer's gradients just before one of them `steps`."""
        if self._looks >= _MOST_LOOKS:
            return
        self._looks += 1
        try:
            self._see(steps, optimizers)
        except Exception:  # noqa: BLE001 - gradients of an unknown kind; the optimizer steps
            self._looks, self._seen = _MOST_LOOKS, {}

    def _see(self, steps: Any, optimizers: Iterable[weakref.ref[Any]]) -> None:
        for one in alive(optimizers)[:_MOST_OPTIMIZERS]:
            seen, gradient = self._seen.setdefault(id(one), _Seen()), _gradient(one)
            mark = None if gradient is None else (id(gradient), int(gradient._version))
            if seen.waiting is not None and (one is steps or mark != seen.mark) and seen.waiting() is not gradient:
                seen.dropped, seen.waiting, seen.passes = seen.dropped + seen.passes, None, 0
            if one is steps:
                seen.used, seen.waiting, seen.passes = seen.used + 1, None, 0
            elif gradient is not None and mark != seen.mark:
                seen.waiting, seen.passes = weakref.ref(gradient), seen.passes + 1
            seen.mark = mark

    def facts(self, models: Iterable[weakref.ref[Any]], optimizers: Iterable[weakref.ref[Any]]) -> list[dict[str, Any]]:
        """Return the models, "(Class)", and children whose gradients were dropped: after so many passes of so many.

        `through`: whether passes go on from them to what is before them.
        """
        found = []
        known = alive(models)
        for one in alive(optimizers):
            seen = self._seen.get(id(one))
            if seen is None or not seen.dropped:
                continue
            own = {id(p) for group in one.param_groups for p in group["params"]}
            for model in known:
                for name, module in (f"({class_of(model)})", model), *children_of(unwrapped(model)):
                    wanted = [p for p in parameters_of(module) if p.requires_grad]
                    if wanted and all(id(p) in own for p in wanted):
                        counts = {"passes": seen.used + seen.dropped, "dropped": seen.dropped}
                        found.append({"module": name, **counts, "through": id(model) in self.through})
        return found


def _gradient(optimizer: Any) -> Any:
    """Return the gradient of an optimizer's first parameter that wants one; None where it has none."""
    first = next((p for group in optimizer.param_groups for p in group["params"] if p.requires_grad), None)
    return None if first is None else first.grad


# So many elements of so many tensors are looked at, the largest first: a million, in about a millisecond.
_ELEMENTS, _TENSORS = 1 << 16, 16


def subnormal_shares(models: Iterable[Any], optimizers: Iterable[Any]) -> dict[str, float]:
    """Return the share of subnormal values in the parameters, and in the optimizers' state; none of what is on no CPU.

    Where the script flushes them (`torch.set_flush_denormal`), there are none.
    """
    import torch

    core: Any = torch._C
    if capture_test()():
        return {}
    of = {
        "parameters": [p for model in models for p in parameters_of(model)],
        "state": [v for one in optimizers for state in one.state.values() for v in state.values()],
    }
    with core.DisableTorchFunction(), core._DisableTorchDispatch(), torch.no_grad():
        shares = {name: _share(values, torch) for name, values in of.items()}
    return {name: share for name, share in shares.items() if share is not None}


def _share(values: Iterable[Any], torch: Any) -> float | None:
    plain = (torch.Tensor, torch.nn.Parameter)
    chosen = [v for v in values if type(v) in plain and v.device.type == "cpu" and v.dtype == torch.float32]
    chosen = [v for v in chosen if v.layout == torch.strided and v.is_contiguous() and v.numel()]
    looked = subnormal = 0
    for value in sorted(chosen, key=lambda v: -v.numel())[:_TENSORS]:
        part = value.detach().view(-1)[:_ELEMENTS]
        looked += part.numel()
        subnormal += int(((part.abs() < torch.finfo(part.dtype).tiny) & (part != 0)).sum())
    return subnormal / looked if looked else None
