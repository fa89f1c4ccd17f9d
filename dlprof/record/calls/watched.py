"""What is watched of torch to see where the script makes its loaders, wrappers and optimizers, and what it calls."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

from dlprof.record.calls.attribution import passing
from dlprof.record.calls.seen import Calls

# Classes of modules that come when a script imports them, by the kind of call that makes one.
_LATER = {"FullyShardedDataParallel": "fsdp"}
# A class that `fully_shard` makes of a module's has this one among its bases.
_SHARDED = "FSDPModule"


def watch(calls: Calls, is_traced: Callable[[], bool], put: Callable[..., object], hidden: Callable[..., Any]) -> None:
    """Put wrappers in the place of what makes such things, by `put` and `hidden` of hooks.py."""
    import torch
    from torch.amp.autocast_mode import autocast
    from torch.amp.grad_scaler import GradScaler
    from torch.nn.parallel import DataParallel, DistributedDataParallel
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    def seeing(original: Any, see: Callable[[Any], object]) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_traced():
                return original(*args, **kwargs)
            if not calls.off:
                see(args[0] if args else None)
            with passing:
                return original(*args, **kwargs)

        return hidden(call)

    def of(kind: str) -> Callable[[Any], object]:
        def look(_: Any) -> object:
            return calls.see(kind)

        return look

    making: Any = DataLoader.__init__

    @functools.wraps(making)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - what it stands for
        with passing:
            making(self, *args, **kwargs)
        calls.see_made(self)

    put(DataLoader, "__init__", hidden(__init__))

    def by_script(kind: str) -> Callable[[Any], object]:
        """See what torch itself calls, too: its profiler synchronizes where it starts and stops."""

        def look(_: Any) -> object:
            caller = sys._getframe(2)
            return None if "/torch/" in caller.f_code.co_filename else calls.see(kind)

        return look

    for name in ("synchronize", "empty_cache"):
        put(torch.cuda, name, seeing(getattr(torch.cuda, name), by_script(name)))
    for mode in (torch.autograd.set_detect_anomaly, torch.autograd.detect_anomaly):
        put(mode, "__init__", seeing(vars(mode)["__init__"], by_script("anomaly")))
    made = {"ddp": DistributedDataParallel, "data_parallel": DataParallel, "optimizer": Optimizer}
    made |= {"autocast": autocast, "grad_scaler": GradScaler}
    for kind, cls in made.items():
        put(cls, "__init__", seeing(vars(cls)["__init__"], of(kind)))
    put(torch, "compile", seeing(torch.compile, of("compile")))

    for name in ("to", "cuda"):
        put(torch.nn.Module, name, seeing(vars(torch.nn.Module)[name], calls.see_moved))

    # Called with each class of modules: one of FSDP's is made when it is imported, the other where it is applied.
    def __init_subclass__(cls: Any, /, **kwargs: Any) -> None:  # noqa: N807 - what it stands for
        super(torch.nn.Module, cls).__init_subclass__(**kwargs)
        with contextlib.suppress(Exception):  # the script's class is made; its calls are then not named
            kind = _LATER.get(cls.__name__)
            if kind is not None and cls.__module__.startswith("torch.distributed."):
                put(cls, "__init__", seeing(vars(cls)["__init__"], of(kind)))
            elif any(base.__name__ == _SHARDED for base in cls.__bases__):
                calls.see("fsdp")

    put(torch.nn.Module, "__init_subclass__", classmethod(hidden(__init_subclass__)))
