"""Samples how many values of models and optimizers are subnormal: on many CPUs these are computed far more slowly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dlprof.record.captured import capture_test
from dlprof.record.model.names import parameters_of

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
