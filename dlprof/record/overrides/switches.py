"""Overrides of what holds for a whole process: precision, cuDNN's benchmark, threads, garbage collection, environment.

They are set when torch has just been imported. What the script sets later is noted, and does not hold. Also that of
copies to a device, copy.non_blocking.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from dlprof.overrides import Value
from dlprof.record.calls.attribution import passing
from dlprof.record.captured import capture_test
from dlprof.record.hooks import at_uninstall, put
from dlprof.record.overrides.constructors import Effects


def install(asked: Mapping[str, Value], effects: Effects) -> None:
    """Set those that were asked for, each by itself."""
    settings: Mapping[str, Callable[[Any, Effects], None]] = {
        "torch.num_threads": _threads,
        "torch.float32_matmul_precision": _precision,
        "torch.cudnn_benchmark": _benchmark,
        "gc.enabled": _collecting,
        "gc.freeze": _freezing,
    }
    for name, setting in settings.items():
        if name in asked:
            with effects.noting(name):
                setting(asked[name], effects)


def begin(asked: Mapping[str, Value], effects: Effects) -> None:
    """Do what is due when training begins."""
    if asked.get("gc.freeze"):
        before = gc.get_freeze_count() > 0
        gc.collect()
        gc.freeze()
        at_uninstall(gc.unfreeze)
        effects.took("gc.freeze", before)


def _freezing(value: bool, effects: Effects) -> None:
    """Have gc.freeze() do nothing, where that was asked for; freezing itself is done when training begins."""
    if value:
        return

    @functools.wraps(gc.freeze)
    def freeze() -> None:
        effects.took("gc.freeze", True)

    put(gc, "freeze", freeze)


def _threads(value: int, effects: Effects) -> None:
    import torch

    name, setting = "torch.num_threads", torch.set_num_threads
    before = torch.get_num_threads()
    setting(value)
    at_uninstall(functools.partial(setting, before))
    effects.took(name, before)

    @functools.wraps(setting)
    def set_num_threads(*args: Any, **kwargs: Any) -> None:
        setting(*args, **kwargs)  # what it refuses, it refuses
        # torch's own calls are those of its loaders' workers, and of the thread that pins.
        if not by_torch(2):
            effects.took(name, torch.get_num_threads())
            setting(value)

    put(torch, "set_num_threads", set_num_threads)


def _precision(value: str, effects: Effects) -> None:
    """Set the precision of products; whatever else sets it ends in one of three functions of torch._C."""
    import torch

    name, setting = "torch.float32_matmul_precision", torch._C._set_float32_matmul_precision
    getting = torch._C._get_float32_matmul_precision
    before = getting()
    setting(value)
    at_uninstall(functools.partial(setting, before))
    effects.took(name, before)

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any) -> Any:
            result = original(*args)
            if not by_torch(3):  # torch itself sets it for a moment, and back
                effects.took(name, args[-1])
            setting(value)
            return result

        return call

    for function in ("_set_float32_matmul_precision", "_set_cublas_allow_tf32", "_set_fp32_precision_setter"):
        if hasattr(torch._C, function):
            put(torch._C, function, watched(getattr(torch._C, function)))


def _benchmark(value: bool, effects: Effects) -> None:
    import torch

    name, kind = "torch.cudnn_benchmark", type(torch.backends.cudnn)
    switch: Any = vars(kind)["benchmark"]
    before = bool(switch.getter())
    switch.setter(value)
    at_uninstall(functools.partial(switch.setter, before))
    effects.took(name, before)

    def setter(given: bool) -> None:
        switch.setter(given)  # what it refuses, it refuses
        effects.took(name, given)
        switch.setter(value)

    put(kind, "benchmark", type(switch)(switch.getter, setter))


def _collecting(value: bool, effects: Effects) -> None:
    """Switch automatic collection on or off; what collects by itself, gc.collect(), stays as it is."""
    name, switches = "gc.enabled", {True: gc.enable, False: gc.disable}
    before = gc.isenabled()
    switches[value]()
    at_uninstall(switches[before])
    effects.took(name, before)

    original = switches[not value]

    @functools.wraps(original)
    def kept() -> None:
        caller = str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0]
        if caller == "torch" or caller in sys.stdlib_module_names - {"__main__"}:
            original()  # for a moment
        else:
            effects.took(name, not value)

    put(gc, original.__name__, kept)


def by_torch(depth: int) -> bool:
    """Return whether the caller so many frames above, besides functions of ours, is torch itself."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("dlprof."):
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).startswith("torch.")


def see_environment(asked: Mapping[str, Value], before: Mapping[str, Any], effects: Effects) -> None:
    """Note which variables are as asked for, and what they were without that: `before`, in the command's environment.

    sitecustomize.py has set them for this process, and keeps them.
    """
    changed = getattr(type(os.environ).__setitem__, "changed", [])
    while changed:
        variable, value, *place = changed.pop(0)
        effects.took(f"env.{variable}", value, placed=tuple(place) if place[0] else False)
    for name, value in asked.items():
        variable = name.partition(".")[2]
        if not name.startswith("env."):
            continue
        if os.environ.get(variable) != value:
            effects.failed(name, "it has another value in the rank")
        elif not effects.has_applied(name):
            effects.took(name, before.get(variable), placed=False)


# -- copies to a device; those from a device stay: the host may read them at once

_COPY = "copy.non_blocking"


def install_copies(asked: Mapping[str, Value], effects: Effects) -> None:
    """Have Tensor.to and Tensor.cuda wait, or not wait, as asked for."""
    import torch

    if _COPY not in asked:
        return
    tensor: Any = torch.Tensor
    for name, target in (("to", _target_of_to), ("cuda", lambda _args, _kwargs: "cuda")):
        put(tensor, name, _copying(getattr(tensor, name), target, bool(asked[_COPY]), effects))


def _copying(original: Any, target: Any, value: bool, effects: Effects) -> Any:
    is_captured = capture_test()  # a graph that the script keeps is as the script has it

    @functools.wraps(original)
    def copy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        before = None
        try:
            # torch's own calls move a model's parameters.
            copied = not is_captured() and tensor.device.type == "cpu" and target(args, kwargs) not in ("", "cpu")
            if copied and not by_torch(2):
                args, kwargs, before = _with_non_blocking(args, kwargs, value)
        except Exception as e:  # noqa: BLE001 - the copy is made as the script says
            effects.failed(_COPY, e)
        with passing:
            result = original(tensor, *args, **kwargs)
        if before is not None:
            effects.took(_COPY, before)
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


def _with_non_blocking(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], value: bool
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Return the arguments with non_blocking as asked for, and what it was.

    Among those by position it is the only truth value but for `copy`, which follows it.
    """
    at = next((i for i, arg in enumerate(args) if isinstance(arg, bool)), None)
    if at is None:
        return args, {**kwargs, "non_blocking": value}, bool(kwargs.get("non_blocking", False))
    return (*args[:at], value, *args[at + 1 :]), dict(kwargs), bool(args[at])
