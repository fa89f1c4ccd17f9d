"""Line by line through the functions that the user named (`--lines`), in the rank and in its loader's workers.

line_profiler counts; it is on only while a chosen function runs, so that nothing else is slowed. A function is changed
where it stands (its code object), and so is counted under whatever name the script holds it: imported by name,
decorated, given to a loader as collate_fn. It counts from its next call on, in every thread. What torch.compile
compiles stays as it is and shows no lines.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import linecache
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import get_ident
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from dlprof import redaction
from dlprof.plain import words_of
from dlprof.record import guarded
from dlprof.record.calls.frames import own_files
from dlprof.record.hooks import at_uninstall, hidden, hide, put
from dlprof.record.log import Log
from dlprof.record.ranks import folder_of_rank
from dlprof.record.recorder import Recorder, say
from dlprof.record.stepping import Step

# The first lines are on disk soon, the later ones rarely: a kill costs little, and the file of a long job stays small.
_FIRST_WRITE_NS = 1_000_000_000
_LAST_WRITE_NS = 60_000_000_000

# `--lines auto` looks at a thread so often, chooses after so many looks, and takes at most so many functions, each with
# at least this share of the looks. 250 looks of 20 ms are 5 s of training.
_LOOK_S = 0.02
_CHOOSE_AFTER = (25, 75, 250)
_MOST_FUNCTIONS = 5
_LEAST_SHARE = 0.05

# Loaders that make their workers anew each epoch bring new processes, each with the source text: not beyond this size
# of the file.
_MOST_SOURCE_BYTES = 4 << 20

_CALL = "__dlprof_lines_"  # what a changed function calls, with a number


class Lines:
    """Writes lines.jsonl: what each process counted since its last line, by function, and the source text once."""

    name = "lines"

    def __init__(self) -> None:
        asked = [target for target in os.environ.get("DLPROF_LINES", "").split("\n") if target]
        self._asked = bool(asked)
        self._auto = "auto" in asked
        self._left = [target for target in asked if target != "auto"]
        self._run = Path(os.environ.get("DLPROF_RUN", ""))
        self._recorder: Recorder | None = None
        self._counts: _Counts | None = None
        self._problem = ""
        self._over = False  # nothing is counted any more
        self._modules = 0  # how many there were when a file's module was last looked for
        if self._asked:
            self._watch_torch()
            at_uninstall(self._end)
            # What a loader's workers run must be changed before they are forked.
            os.register_at_fork(before=self._look, after_in_child=self._forked)

    def start(self, recorder: Recorder) -> None:
        """Look the functions up, as far as they are there by now."""
        if not self._asked:
            return
        self._recorder = recorder
        self._look()
        self._watch_thread()

    def step(self, done: Sequence[Step]) -> None:
        """Look for functions that came later, and write from time to time."""
        recorder = self._recorder
        if recorder is None:
            return
        self._look()
        self._warn(recorder)
        if self._counts is not None and done[-1].end_ns > self._counts.due_ns:
            self._counts.write(recorder.folder, "main")

    def stop(self) -> None:
        """Write the rest, and warn of functions that were never found."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        if self._counts is not None:
            self._counts.write(recorder.folder, "main")
        if self._left and not self._problem:
            self._problem = f"lines: no such Python function was found: {', '.join(self._left)}"
        self._warn(recorder)

    def _end(self) -> None:
        """Change no function any more, and give those that were changed their own code back."""
        self._over = True
        if self._counts is not None:
            self._counts.restore()

    def _warn(self, recorder: Recorder) -> None:
        if self._problem and self._problem not in recorder.warnings:
            recorder.warn(self._problem)

    @guarded
    def _look(self) -> None:
        """Change the wanted functions that are there by now."""
        if self._problem or self._over or not self._left:
            return
        # Of the modules that were there at the last look, only the script's own may have grown.
        modules = list(sys.modules.values()) if len(sys.modules) != self._modules else [sys.modules.get("__main__")]
        self._modules = len(sys.modules)
        for target in tuple(self._left):
            function = _find(target, modules)
            if function is not None:
                self._add(target, function)
                self._left.remove(target)

    def fail(self, error: Exception) -> None:
        """Change no further function, and keep the reason for the next step to warn of."""
        self._problem = f"lines are off: {_reason(error)}"

    def _add(self, target: str, function: FunctionType) -> None:
        self._counts = self._counts or _Counts()
        self._counts.add(target, function)

    def _forked(self) -> None:
        """Begin anew in a fork's child: it is no rank, or yet to become one."""
        self._recorder = None
        if self._counts is not None:
            self._counts.forget()

    def _watch_torch(self) -> None:
        from torch.optim import Optimizer
        from torch.utils.data import _utils

        # A script makes its optimizer after it has defined its functions and before it calls the one with its loop.
        making: Any = Optimizer.__init__

        @functools.wraps(making)
        def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - what it stands for
            self._look()
            making(optimizer, *args, **kwargs)

        # The first thing that a worker does: PyTorch's, and torchdata's, whose loop is its own.
        handling: Any = _utils.signal_handling
        beginning = handling._set_worker_signal_handlers

        def _set_worker_signal_handlers() -> None:
            beginning()
            try:
                self._begin_worker()
            except Exception as e:  # noqa: BLE001 - the worker goes on
                say(f"the lines of a loader's worker are off: {_reason(e)}")

        put(Optimizer, "__init__", __init__)
        put(handling, "_set_worker_signal_handlers", _set_worker_signal_handlers)

    def _begin_worker(self) -> None:
        """Count in a loader's worker too, and see to it that what is counted is written."""
        from multiprocessing.util import Finalize

        self._look()
        self._watch_thread()
        writing = threading.Lock()

        def write() -> None:
            counts = self._counts
            with writing, contextlib.suppress(OSError):
                folder = folder_of_rank(self._run)
                if counts is not None and folder is not None:
                    counts.write(folder, "worker")

        def keep_writing() -> None:
            pause_ns = _FIRST_WRITE_NS
            while True:
                time.sleep(pause_ns / 1e9)
                pause_ns = min(pause_ns * 2, _LAST_WRITE_NS)
                write()

        threading.Thread(target=keep_writing, name="dlprof lines", daemon=True).start()
        Finalize(None, write, exitpriority=10)

    @guarded
    def _watch_thread(self) -> None:
        """Choose the hottest functions of the user's own files, where that was asked, from looks at this thread."""
        if not self._auto or self._problem:
            return
        # Here, since a thread that imports must not meet a fork.
        self._counts = self._counts or _Counts()
        arguments = (get_ident(), own_files())
        threading.Thread(target=self._choose, args=arguments, name="dlprof lines auto", daemon=True).start()

    @guarded
    def _choose(self, ident: int, is_own: Callable[[str], bool]) -> None:
        seen: Counter[tuple[CodeType, str]] = Counter()
        chosen: set[tuple[CodeType, str]] = set()
        for look in range(1, _CHOOSE_AFTER[-1] + 1):
            time.sleep(_LOOK_S)
            if self._over:
                return
            frame = sys._current_frames().get(ident)
            while frame is not None and not is_own(frame.f_code.co_filename):
                frame = frame.f_back
            if frame is not None:
                seen[frame.f_code, str(frame.f_globals.get("__name__"))] += 1
            frame = None  # it would keep the script's tensors
            for (code, name), times in seen.most_common(_MOST_FUNCTIONS) if look in _CHOOSE_AFTER else ():
                function = _function_of(code, sys.modules.get(name))
                often = times >= _LEAST_SHARE * look and len(chosen) < _MOST_FUNCTIONS
                if often and function is not None and (code, name) not in chosen:
                    chosen.add((code, name))
                    self._add(f"{name}:{function.__qualname__}", function)


class _Counts:
    """The line_profiler of a process, the functions that it counts, and what of that is written."""

    def __init__(self) -> None:
        from line_profiler import LineProfiler

        monitoring = getattr(sys, "monitoring", None)
        other = monitoring.get_tool(monitoring.PROFILER_ID) if monitoring is not None else None
        if other not in (None, "line_profiler"):
            raise RuntimeError(f"the script is being profiled by {other}")
        self._profiler: Any = LineProfiler()
        self._changed: list[tuple[FunctionType, CodeType, str]] = []  # with their own code, and the name of our call
        self._functions: dict[tuple[str, int], str] = {}  # file and first line → its name
        self._source: dict[tuple[str, int], str] = {}  # yet to be written
        self._written: dict[tuple[str, int, int], tuple[int, int]] = {}  # file, first line, line → hits, ns
        self._pause_ns = _FIRST_WRITE_NS
        self.due_ns = time.perf_counter_ns() + self._pause_ns

    def add(self, name: str, function: FunctionType) -> None:
        """Count a function from its next call on. Other threads may be in it: it changes by one assignment."""
        import torch

        code = function.__code__
        if (at := (code.co_filename, code.co_firstlineno)) in self._functions:
            return
        inner = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
        inner.__kwdefaults__ = function.__kwdefaults__
        inner.__qualname__ = function.__qualname__
        self._profiler.add_function(inner)
        self._functions[at] = name
        block = inspect.getblock(linecache.getlines(at[0], function.__globals__)[at[1] - 1 :])
        self._source[at] = redaction.source("".join(block))
        # By a global name of its own: of what a code object can refer to, that is what torch.compile can follow.
        call = f"{_CALL}{len(self._functions)}"
        function.__globals__[call] = self._counted(inner, torch.compiler.is_compiling)
        if not hasattr(function, "__signature__"):
            function.__signature__ = inspect.signature(inner)  # type: ignore[attr-defined]
        self._changed.append((function, code, call))
        function.__code__ = _passing_on(call, code)
        hide(function)

    def _counted(self, inner: FunctionType, is_compiling: Callable[[], bool]) -> Any:
        profiler = self._profiler
        resumed = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
        if inner.__code__.co_flags & resumed:
            return profiler.wrap_callable(inner)

        def call(*args: Any, **kwargs: Any) -> Any:
            # Neither what is being compiled nor a thread that a debugger or coverage follows is touched.
            if is_compiling() or (sys.gettrace() is not None and not profiler.enable_count):
                return inner(*args, **kwargs)
            profiler.enable_by_count()
            try:
                return inner(*args, **kwargs)
            finally:
                profiler.disable_by_count()

        return hidden(call)

    def restore(self) -> None:
        """Give the functions their own code back."""
        for function, code, call in self._changed:
            function.__code__ = code
            function.__globals__.pop(call, None)

    def forget(self) -> None:
        """Forget what another process, this one's parent, has counted."""
        while self._profiler.enable_count:
            self._profiler.disable_by_count()
        self._written = self._now()

    def write(self, folder: Path, role: str) -> None:
        """Append what was counted since the last time; raises OSError where the folder is full or gone."""
        self.due_ns = time.perf_counter_ns() + self._pause_ns
        self._pause_ns = min(self._pause_ns * 2, _LAST_WRITE_NS)
        before, self._written = self._written, self._now()
        grown: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
        for (file, first, line), (hits, ns) in self._written.items():
            hits_before, ns_before = before.get((file, first, line), (0, 0))
            if hits > hits_before:
                grown.setdefault((file, first), []).append((line, hits - hits_before, ns - ns_before))
        if not grown:
            return
        with contextlib.closing(Log(folder / "lines.jsonl")) as log:
            wordy = log.size < _MOST_SOURCE_BYTES
            for at, lines in grown.items():
                row = {"role": role, "function": self._functions[at], "file": at[0], "first": at[1], "lines": lines}
                source = self._source.pop(at, None)
                log.write(json.dumps(row | ({"source": source} if source and wordy else {})) + "\n")

    def _now(self) -> dict[tuple[str, int, int], tuple[int, int]]:
        stats = self._profiler.get_stats()
        ns = stats.unit * 1e9
        return {
            (file, first, line): (hits, round(took * ns))
            for (file, first, _), lines in stats.timings.items()
            for line, hits, took in lines
        }


def _is_of(module: Any, path: str) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and file.endswith(".py") and os.path.realpath(file) == path


def _find(target: str, modules: Iterable[Any]) -> FunctionType | None:
    """Return the function of module:function or path.py:function, if its module is there and has it.

    A path is looked for among `modules`.
    """
    where, _, name = target.rpartition(":")
    found: Any = sys.modules.get(where)
    if found is None and where.endswith(".py"):
        path = os.path.realpath(where)
        found = next((m for m in modules if _is_of(m, path)), None)
    for part in name.split("."):
        found = inspect.getattr_static(found, part, None)
    return _innermost(found)


def _innermost(found: Any) -> FunctionType | None:
    """Return the function inside decorators, a property, a bound or static method; None: there is none."""
    for _ in range(100):
        if isinstance(found, property):
            found = found.fget
        elif isinstance(found, (functools.partial, functools.cached_property)):
            found = found.func
        elif isinstance(found, (staticmethod, classmethod, MethodType)):
            found = found.__func__
        elif "__wrapped__" in getattr(found, "__dict__", ()):
            found = found.__wrapped__
        else:
            break
    return found if isinstance(found, FunctionType) else None


def _function_of(code: CodeType, module: ModuleType | None) -> FunctionType | None:
    """Find the function of a code object among those of a module and of its classes; None: it has no name there."""
    spaces: list[Any] = [module]
    for space in spaces:
        for value in tuple(getattr(space, "__dict__", {}).values()):
            function = _innermost(value)
            if function is not None and function.__code__ is code:
                return function
            if isinstance(value, type) and value.__module__ == getattr(module, "__name__", "") and value not in spaces:
                spaces.append(value)
    return None


def _passing_on(call: str, code: CodeType) -> CodeType:
    """Return the code of a function that passes its call on, in the place and under the name of the original."""
    text = f"def passing_on(*args, **kwargs): return {call}(*args, **kwargs)"
    made: CodeType = compile(text, code.co_filename, "exec").co_consts[0]
    return made.replace(co_name=code.co_name, co_firstlineno=code.co_firstlineno, co_freevars=code.co_freevars)


def _reason(error: Exception) -> str:
    if isinstance(error, ImportError):
        return f"the script's Python has no line_profiler (pip install line_profiler): {error}"
    return words_of(error)
