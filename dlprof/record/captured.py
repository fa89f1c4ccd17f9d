"""Finds out whether what runs is captured into a graph: then no code of ours may run, as it would be in the graph.

torch.jit.trace, the ONNX exporters, torch.fx, make_fx, torch.export and AOTAutograd note every operator that is called
while they look. That holds for the ranges of the profiler, and for a look at the shape of a tensor too. And what runs
on fake tensors is no work. torch.func's transforms (grad, vmap, jvp, …) keep no graph: what runs under them is work.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])


@functools.cache
def capture_test() -> Callable[[], bool]:
    """Return a function that checks this for the calling thread, in about 0.1 µs; it skips what this torch lacks.

    Where Dynamo may read the caller, ask torch.compiler.is_dynamo_compiling() before.
    """
    import torch.fx._symbolic_trace

    core: Any = torch._C
    compiler: Any = _with_flag(torch.compiler, "_is_compiling_flag")
    fx: Any = _with_flag(torch.fx._symbolic_trace, "_is_fx_tracing_flag")
    traces: Callable[[], Any] = getattr(core, "_get_tracing_state", lambda: None)
    count_modes: Callable[[], int] = getattr(core, "_len_torch_dispatch_stack", lambda: 0)
    mode_of: Callable[[Any], Any] = getattr(core, "_get_dispatch_mode", lambda _: None)
    kinds = getattr(core, "_TorchDispatchModeKey", None)
    keys = [key for name in ("PROXY", "FAKE", "FUNCTIONAL") if (key := getattr(kinds, name, None)) is not None]

    def is_captured() -> bool:
        if compiler._is_compiling_flag or fx._is_fx_tracing_flag or traces() is not None:
            return True
        if count_modes():  # the script's own, and the one that counts operations, capture nothing
            for key in keys:
                if mode_of(key) is not None:
                    return True
        return False

    return is_captured


def _with_flag(module: Any, name: str) -> Any:
    return module if hasattr(module, name) else SimpleNamespace(**{name: False})


def unseen(function: _F) -> _F:
    """Hide what a function of ours reads of tensors, such as their shapes, from the script's TorchFunctionModes."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        core: Any = sys.modules["torch"]._C if "torch" in sys.modules else None
        count_modes = getattr(core, "_len_torch_function_stack", None)
        if count_modes is None or not count_modes():
            return function(*args, **kwargs)
        with core.DisableTorchFunction():
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]


@functools.cache
def unseen_range() -> Any:
    """Return torch's record_function as a class whose operators no TorchDispatchMode or TorchFunctionMode sees."""
    import torch

    core: Any = torch._C
    named: Any = torch.autograd.profiler.record_function

    class Unseen(named):  # type: ignore[misc]
        def __enter__(self) -> Any:
            with core.DisableTorchFunction(), core._DisableTorchDispatch():
                return super().__enter__()

        def __exit__(self, *raised: object) -> None:
            with core.DisableTorchFunction(), core._DisableTorchDispatch():
                super().__exit__(*raised)

    return Unseen
