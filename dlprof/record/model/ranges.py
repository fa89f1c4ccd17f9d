"""Names each module's forward pass in the trace, while the profiler records and at no other time.

A range is `nn.Module: PATH (Class)`. The hook on nn.Module.__call__ opens it, on any thread: a checkpointed block runs
again in the backward pass, and DataParallel has a thread for each copy of the model. In the step whose floating-point
operations are counted, the same hook shows which module an operator belongs to.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable
from time import perf_counter_ns
from typing import Any

from dlprof.plain import words_of
from dlprof.record.model.names import below, class_of, modules_of, named, names_of, names_of_all
from dlprof.record.step_clock import FETCH, Phases

# The number of ranges that are opened after the window's last step to measure their cost.
_MEASURED = 100

# The most modules that have names, in case a script keeps creating modules.
_MOST = 100_000


class Ranges:
    """The ranges of a process's modules. The hook opens them while the clock's `naming` is set."""

    def __init__(self, clock: Phases, warn: Callable[[str], None]) -> None:
        self.count = 0  # ranges so far
        self.flops: dict[tuple[str, str], int] = {}  # FLOPs of a step by module and part, once counted
        self.moved: dict[str, int] = {}  # bytes that the step's operators read and write, by module
        self._clock = clock
        self._warn = warn
        self._make: Any = None
        self._follows = False
        self._names: dict[int, tuple[weakref.ref[Any], str]] = {}

    def start(self, models: Iterable[Any]) -> None:
        """Name the modules of these models, and open ranges from now on."""
        import torch._C

        make = getattr(getattr(torch._C, "_profiler", None), "_RecordFunctionFast", None)
        if make is not None:  # an old torch has none: its traces show no modules
            self.follow_no_more()
            self.count = 0
            self._start(make, models)

    def follow(self, models: Iterable[Any]) -> Callable[[], str]:
        """Track modules without ranges; return a function that names the innermost module of its thread, or ""."""
        inner = _Inner()
        self._follows = True
        self._clock.ranges.append(_no_range)  # makes the phases check whether modules are named
        self._start(lambda name: _Followed(inner, name), models)
        return lambda: inner.names[-1] if inner.names else ""

    def follow_no_more(self) -> None:
        """End what `follow` began; ranges since then stay on."""
        if self._follows:
            self.stop()

    def _start(self, make: Any, models: Iterable[Any]) -> None:
        self._make, known = make, list(models)
        try:
            names = names_of_all(known)
            for model in known:
                self._know(model, names)
        except Exception as e:  # noqa: BLE001 - it calls the script's own classes
            self._warn(f"modules are not named in the trace: {words_of(e)}")
        else:
            self._clock.naming = not self._clock.off

    def open_exchange(self, module: Any, moves: str) -> Any:
        """Open the range of an exchange that moves a module's parameters or gradients, as `open` does."""
        return self.open(module, f"dlprof::{moves} ") if self._clock.naming else None

    def open(self, module: Any, before: str = "") -> Any:
        """Open a module's range and return it; its __exit__ closes it. None if it has no range.

        `before` is the prefix of its name.
        """
        try:
            phases = self._clock.phases
            if phases and phases[-1] == FETCH:
                return None  # transforms of a loader are not part of the model
            known = self._names.get(id(module))
            if known is None or known[0]() is not module:
                known = self._meet(module)
            if not known[1]:
                return None
            opened = self._make(before + known[1])
            opened.__enter__()
        except Exception as e:  # noqa: BLE001 - the script goes on
            self._clock.naming = False
            self._warn(f"modules are no longer named in the trace: {words_of(e)}")
            return None
        self.count += 1
        return opened

    def measure(self) -> int:
        """Return the cost of a range in ns while the profiler records; these are in the trace after its last step."""
        if self._make is None:
            return 0
        took = []
        for _ in range(_MEASURED):
            began = perf_counter_ns()
            opened = self._make("dlprof::range")
            opened.__enter__()
            opened.__exit__(None, None, None)
            took.append(perf_counter_ns() - began)
        return sorted(took)[_MEASURED // 2]  # a mean would include other work of the machine

    def stop(self) -> None:
        """Open no more ranges, and forget the modules."""
        clock = self._clock
        self._follows = False
        if _no_range in clock.ranges:
            clock.ranges.remove(_no_range)
        if clock.naming:
            clock.naming = False
            clock.inside = clock.off or clock.is_within
        self._names.clear()

    def _meet(self, module: Any) -> tuple[weakref.ref[Any], str]:
        """Name a called module that is in no known model, and the modules inside it; return its entry."""
        if len(self._names) >= _MOST:
            self._names.clear()
        if type(module).__module__.startswith(("torch.fx.", "torch._dynamo.")):
            # torch.compile creates such modules when it splits a model, as for DistributedDataParallel.
            self._names[id(module)] = (weakref.ref(module), "")
            return self._names[id(module)]
        names = names_of(module)
        # DataParallel calls new copies of the model in each step. Anything else is a loss or another model.
        self._know(module, names if getattr(module, "_is_replica", False) else below(class_of(module), names))
        return self._names[id(module)]

    def _know(self, model: Any, names: dict[int, tuple[str, str]]) -> None:
        for module in modules_of(model):
            if id(module) in names:
                path, kind = names[id(module)]
                self._names[id(module)] = (weakref.ref(module), named(path, kind))


def _no_range(_name: str) -> Any:
    return contextlib.nullcontext()


class _Inner(threading.local):
    """The modules that run on a thread, the innermost last."""

    def __init__(self) -> None:
        self.names: list[str] = []


class _Followed:
    """Used instead of a range; it only tracks the module."""

    def __init__(self, inner: _Inner, name: str) -> None:
        self._names = inner.names
        self._name = name

    def __enter__(self) -> None:
        self._names.append(self._name)

    def __exit__(self, *_: object) -> None:
        self._names.pop()
