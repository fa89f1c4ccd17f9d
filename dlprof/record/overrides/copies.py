"""Overrides of copies to a device: copy.non_blocking. Copies from a device stay: the host may read them at once."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from dlprof.overrides import Value
from dlprof.record.attribution import passing
from dlprof.record.captured import capture_test
from dlprof.record.hooks import put
from dlprof.record.overrides.constructors import Effects
from dlprof.record.overrides.switches import by_torch

_NAME = "copy.non_blocking"


def install(asked: Mapping[str, Value], effects: Effects) -> None:
    """Have Tensor.to and Tensor.cuda wait, or not wait, as asked for."""
    import torch

    if _NAME not in asked:
        return
    tensor: Any = torch.Tensor
    for name, target in (("to", _target_of_to), ("cuda", lambda _args, _kwargs: "cuda")):
        put(tensor, name, _watched(getattr(tensor, name), target, bool(asked[_NAME]), effects))


def _watched(original: Any, target: Any, value: bool, effects: Effects) -> Any:
    is_captured = capture_test()  # a graph that the script keeps is as the script has it

    @functools.wraps(original)
    def copy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        before = None
        try:
            # torch's own calls move a model's parameters.
            copied = not is_captured() and tensor.device.type == "cpu" and target(args, kwargs) not in ("", "cpu")
            if copied and not by_torch(2):
                args, kwargs, before = _changed(args, kwargs, value)
        except Exception as e:  # noqa: BLE001 - the copy is made as the script says
            effects.failed(_NAME, e)
        with passing:
            result = original(tensor, *args, **kwargs)
        if before is not None:
            effects.took(_NAME, before)
        return result

    return copy


def _target_of_to(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return the type of device that Tensor.to copies to; "": it names none."""
    import torch

    where = kwargs.get("device", kwargs.get("other", args[0] if args else None))
    if isinstance(where, torch.Tensor):
        where = where.device
    if isinstance(where, torch.dtype) or where is None:
        return ""
    return torch.device(where).type


def _changed(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], value: bool
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Return the arguments with non_blocking as asked for, and what it was.

    Among those by position it is the only truth value but for `copy`, which follows it.
    """
    at = next((i for i, arg in enumerate(args) if isinstance(arg, bool)), None)
    if at is None:
        return args, {**kwargs, "non_blocking": value}, bool(kwargs.get("non_blocking", False))
    return (*args[:at], value, *args[at + 1 :]), dict(kwargs), bool(args[at])
