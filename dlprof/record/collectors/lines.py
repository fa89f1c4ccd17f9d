"""Times the functions that the user named (`--lines`) line by line, in the rank and in its loader's workers.

line_profiler does the counting; it is on only while a chosen function runs, so nothing else is slowed down. The code
object of a function is replaced in place, so its calls count by whatever name the script uses: imported by name,
decorated, or given to a loader as collate_fn. Counting starts with the next call, in every thread. Functions that
torch.compile compiles stay unchanged and show no lines.
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
from dlprof.record.step_clock import Step

# The first counts are written soon and later ones rarely: a kill loses little, and the file of a long job stays small.
_FIRST_WRITE_NS = 1_000_000_000
_LAST_WRITE_NS = 60_000_000_000

# `--lines auto` samples a thread at this interval, chooses after these numbers of samples, and takes at most this many
# functions, each with at least this share of the samples. 250 samples every 20 ms are 5 s of training.
_LOOK_S = 0.02
_CHOOSE_AFTER = (25, 75, 250)
_MOST_FUNCTIONS = 5
_LEAST_SHARE = 0.05

# Loaders that start new workers in each epoch bring new processes, and each writes the source text, unless the file is
# larger than this.
_MOST_SOURCE_BYTES = 4 << 20

_CALL = "__dlprof_lines_"  # a changed function calls this name with a number


class Lines:
    """Writes lines.jsonl: the counts of each process since its last line, by function, and the source text once."""

    name = "lines"

    def __init__(self) -> None:
        targets = [target for target in os.environ.get("DLPROF_LINES", "").split("\n") if target]
        self._wanted = bool(targets)
        self._auto = "auto" in targets
        self._left = [target for target in targets if target != "auto"]
        self._run = Path(os.environ.get("DLPROF_RUN", ""))
        self._recorder: Recorder | None = None
        self._counts: _Counts | None = None
        self._problem = ""
        self._over = False  # counting has ended
        self._modules = 0  # how many modules there were at the last search
        if self._wanted:
            self._wrap_torch()
            at_uninstall(self._end)
            # Functions that a loader's workers run must be changed before the workers are forked.
            os.register_at_fork(before=self._look, after_in_child=self._forked)

    def start(self, recorder: Recorder) -> None:
        """Change the functions that exist by now."""
        if not self._wanted:
            return
        self._recorder = recorder
        self._look()
        self._sample_thread()

    def step(self, done: Sequence[Step]) -> None:
        """Change functions that were defined since, and write from time to time."""
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
        """Stop changing functions, and restore the code of those that were changed."""
        self._over = True
        if self._counts is not None:
            self._counts.restore()

    def _warn(self, recorder: Recorder) -> None:
        if self._problem and self._problem not in recorder.warnings:
            recorder.warn(self._problem)

    @guarded
    def _look(self) -> None:
        """Change the wanted functions that exist by now."""
        if self._problem or self._over or not self._left:
            return
        # Of the modules that existed at the last search, only the script itself can have new functions.
        modules = list(sys.modules.values()) if len(sys.modules) != self._modules else [sys.modules.get("__main__")]
        self._modules = len(sys.modules)
        for target in tuple(self._left):
            function = _find(target, modules)
            if function is not None:
                self._add(target, function)
                self._left.remove(target)

    def fail(self, error: Exception) -> None:
        """Change no further functions, and keep the reason for a warning in the next step."""
        self._problem = f"lines are off: {_reason(error)}"

    def _add(self, target: str, function: FunctionType) -> None:
        self._counts = self._counts or _Counts()
        self._counts.add(target, function)

    def _forked(self) -> None:
        """Reset in a forked child: it is not a rank, or will become one later."""
        self._recorder = None
        if self._counts is not None:
            self._counts.forget()

    def _wrap_torch(self) -> None:
        from torch.optim import Optimizer
        from torch.utils.data import _utils

        # A script creates its optimizer after it has defined its functions and before it calls its training loop.
        making: Any = Optimizer.__init__

        @functools.wraps(making)
        def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - what it stands for
            self._look()
            making(optimizer, *args, **kwargs)

        # Workers of PyTorch, and of torchdata, which has a loop of its own, call this first.
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
        """Count in a loader's worker too, and write its counts regularly and at its end."""
        from multiprocessing.util import Finalize

        self._look()
        self._sample_thread()
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
    def _sample_thread(self) -> None:
        """With `--lines auto`, choose the hottest functions of the user's own files from samples of this thread."""
        if not self._auto or self._problem:
            return
        # Here, because a thread must not be importing while the process forks.
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
            frame = None  # a frame keeps the script's tensors alive
            for (code, name), times in seen.most_common(_MOST_FUNCTIONS) if look in _CHOOSE_AFTER else ():
                function = _function_of(code, sys.modules.get(name))
                often = times >= _LEAST_SHARE * look and len(chosen) < _MOST_FUNCTIONS
                if often and function is not None and (code, name) not in chosen:
                    chosen.add((code, name))
                    self._add(f"{name}:{function.__qualname__}", function)


class _Counts:
    """The line_profiler of a process, the functions that it counts, and the counts that were written."""

    def __init__(self) -> None:
        from line_profiler import LineProfiler

        monitoring = getattr(sys, "monitoring", None)
        other = monitoring.get_tool(monitoring.PROFILER_ID) if monitoring is not None else None
        if other not in (None, "line_profiler"):
            raise RuntimeError(f"the script is being profiled by {other}")
        self._profiler: Any = LineProfiler()
        self._changed: list[tuple[FunctionType, CodeType, str]] = []  # with the original code and the name of our call
        self._functions: dict[tuple[str, int], str] = {}  # file and first line → its name
        self._source: dict[tuple[str, int], str] = {}  # not written yet
        self._written: dict[tuple[str, int, int], tuple[int, int]] = {}  # file, first line, line → hits, ns
        self._pause_ns = _FIRST_WRITE_NS
        self.due_ns = time.perf_counter_ns() + self._pause_ns

    def add(self, name: str, function: FunctionType) -> None:
        """Count a function from its next call on. It changes by one assignment, since other threads may be in it."""
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
        # The new code refers to our call by a global name: torch.compile can follow that.
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
            # Leave alone what is being compiled, and threads that a debugger or coverage traces.
            if is_compiling() or (sys.gettrace() is not None and not profiler.enable_count):
                return inner(*args, **kwargs)
            profiler.enable_by_count()
            try:
                return inner(*args, **kwargs)
            finally:
                profiler.disable_by_count()

        return hidden(call)

    def restore(self) -> None:
        """Restore the original code of the functions."""
        for function, code, call in self._changed:
            function.__code__ = code
            function.__globals__.pop(call, None)

    def forget(self) -> None:
        """Forget what the parent process has counted."""
        while self._profiler.enable_count:
            self._profiler.disable_by_count()
        self._written = self._now()

    def write(self, folder: Path, role: str) -> None:
        """Append the counts since the last time. Raises OSError if the folder is full or gone."""
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
    """Return the function of module:function or path.py:function, if its module is loaded and has it.

    A path is searched among `modules`.
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
    """Return the function inside decorators, a property, a bound or static method; None if there is none."""
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
    """Find the function of a code object in a module and its classes; None if no name there leads to it."""
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
    """Return code that passes the call on, with the name and the line of the original."""
    text = f"def passing_on(*args, **kwargs): return {call}(*args, **kwargs)"
    made: CodeType = compile(text, code.co_filename, "exec").co_consts[0]
    return made.replace(co_name=code.co_name, co_firstlineno=code.co_firstlineno, co_freevars=code.co_freevars)


def _reason(error: Exception) -> str:
    if isinstance(error, ImportError):
        return f"the script's Python has no line_profiler (pip install line_profiler): {error}"
    return words_of(error)
