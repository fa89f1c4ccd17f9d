"""Records what delays a step and is in no trace: garbage collection, saving checkpoints, compiling."""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import get_ident
from typing import Any

from dlprof import redaction
from dlprof.plain import words_of
from dlprof.record import guarded
from dlprof.record.attribution import passing
from dlprof.record.hooks import put
from dlprof.record.log import WRITE_EVERY_NS, Part
from dlprof.record.recorder import Recorder
from dlprof.record.step_clock import PHASES, Step

# Shorter stalls are dropped and not counted. Young generations are collected many times a second, which takes
# microseconds each time. Longer stalls are rare, so the file stays small.
_LEAST_NS = 1_000_000

# This many stalls have a line each. After that, the collections of one write share a line: some 8 lines a second, or
# 5 MB an hour, in a job that collects garbage in every step.
_MOST_FULL = 10_000

# Of what is saved, so many tensors are looked at.
_MOST_TENSORS = 10_000


@dataclass(frozen=True)
class _Stall:
    """One stall, with the fields of its line."""

    kind: str
    start_ns: int
    dur_ns: int
    step: int
    generation: int | None
    path: str | None
    phase: str
    reason: str | None = None
    count: int = 1  # stalls on this line; dur_ns is their sum
    values_bytes: int = -1
    storage_bytes: int = -1


class Stalls:
    """Writes the log `stalls`: keys and units as in the table `stalls`.

    Garbage collection stops every thread of the interpreter, so it counts on whichever thread it started. Saving counts
    on the training thread only. A save or a collection inside a save is part of the outermost save. So is renaming the
    file afterwards: where it replaces an older one, the pages of that one are freed. Compilations are read from what
    Dynamo keeps of them after each step: no code of ours runs while Dynamo compiles.
    """

    name = "stalls"

    def __init__(self) -> None:
        self._recorder: Recorder | None = None  # None before the start and after the end
        self._thread = 0
        self._log: Part | None = None
        self._found: list[_Stall] = []
        self._written_ns = 0
        self._lines = 0
        self._gc_began_ns = 0
        self._saving = False
        self._saved_as: str | None = None  # the file that was saved last
        self._distributed_wrapped = False
        self._compilation: Any = None  # the newest compilation that we have read
        self._compiled_to_us = 0
        self._dynamo_is_known = True
        self._wrap_torch()

    def start(self, recorder: Recorder) -> None:
        """Begin the log, which stays empty if nothing stalls, and register with the garbage collector."""
        self._log = recorder.log("stalls")
        self._thread = get_ident()
        self._wrap_distributed()
        os.register_at_fork(after_in_child=self._disarm)
        self._recorder = recorder
        self._see_compilations(recorder, ())
        gc.callbacks.append(self._collecting)

    def step(self, done: Sequence[Step]) -> None:
        """Write the stalls collected so far."""
        if self._recorder is None:
            return
        if not self._distributed_wrapped:
            self._wrap_distributed()
        self._see_compilations(self._recorder, done)
        now = done[-1].end_ns
        if self._found and now - self._written_ns >= WRITE_EVERY_NS:
            self._written_ns = now
            self._write()

    def stop(self) -> None:
        """Stop recording and write the rest."""
        try:
            if self._recorder is not None:
                self._see_compilations(self._recorder, ())
            self._write()
        finally:
            self._disarm()

    def _disarm(self) -> None:
        """Stop recording: the wrappers only pass calls on. A forked child calls this too."""
        self._recorder = None
        self._found.clear()
        if self._collecting in gc.callbacks:
            gc.callbacks.remove(self._collecting)

    def _collecting(self, moment: str, info: dict[str, Any]) -> None:
        # This runs inside the garbage collector: it must not raise, and must be quick.
        if moment == "start":
            self._gc_began_ns = time.perf_counter_ns()
            return
        began, self._gc_began_ns = self._gc_began_ns, 0
        if began and not self._saving:
            self._add("garbage_collection", began, generation=info.get("generation"))

    def _add(self, kind: str, began: int, generation: int | None = None, path: str | None = None) -> None:
        """Add a stall that ends now."""
        dur, recorder = time.perf_counter_ns() - began, self._recorder
        if recorder is None or dur < _LEAST_NS:
            return
        # A collection that another thread started may end in a later step than it began in: it counts there.
        clock = recorder.clock
        phase = PHASES[clock.phase] if clock.phase is not None else "rest"
        self._found.append(_Stall(kind, recorder.unix(began), dur, clock.row.number, generation, path, phase))

    def _see_compilations(self, recorder: Recorder, done: Sequence[Step]) -> None:
        """Add what Dynamo has compiled since the last call: in these steps, or in the step that has just begun."""
        # Dynamo keeps its last compilations here. A process that compiles nothing never imports this module.
        known = getattr(sys.modules.get("torch._dynamo.utils"), "_compilation_metrics", None)
        if not known or known[-1] is self._compilation or not self._dynamo_is_known:
            return
        self._compilation = known[-1]
        try:
            self._add_compilations(recorder, known, done)
        except (AttributeError, TypeError, ValueError) as e:  # an unknown version of Dynamo
            self._dynamo_is_known = False
            recorder.warn(f"compilations are not recorded from here on: {words_of(e)}")

    def _add_compilations(self, recorder: Recorder, known: Any, done: Sequence[Step]) -> None:
        timed = (c for c in tuple(known) if getattr(c, "start_time_us", None) and getattr(c, "end_time_us", None))
        since_us = max(self._compiled_to_us, recorder.unix_ns // 1000)  # a notebook may have compiled before
        new = [c for c in timed if c.end_time_us > since_us]
        if not new:
            return
        if self._compiled_to_us and len(new) == known.maxlen:
            recorder.warn(f"{known.maxlen} or more compilations in one step: Dynamo remembers no more of them")
        self._compiled_to_us = max(c.end_time_us for c in new)
        # Dynamo uses the system clock, which may have been changed during the job.
        ahead = time.time_ns() - recorder.unix(time.perf_counter_ns())
        frames = {str(c.compile_id): c for c in known if c.co_name}
        ended = 0
        for c in sorted(new, key=lambda c: (c.start_time_us, -c.end_time_us)):
            start, end = c.start_time_us * 1000 - ahead, c.end_time_us * 1000 - ahead
            if end <= ended or end - start < _LEAST_NS:
                continue  # a backward pass is compiled within its forward pass, or when it first runs
            ended = end
            frame = frames.get(str(c.compile_id))
            again = not str(c.compile_id).rpartition("/")[2].startswith("0")
            path = f"{frame.co_filename}:{frame.co_firstlineno} {frame.co_name}" if frame is not None else None
            reason = (frame.recompile_reason if frame is not None else None) or "unknown" if again else None
            reason = redaction.source(reason) if reason else reason
            phase = "backward" if c.is_forward is False else "forward"
            within = (s.number for s in done if recorder.unix(s.end_ns) >= end)
            step = next(within, recorder.clock.row.number)
            # A garbage collection during the compilation is part of it.
            self._found[:] = [f for f in self._found if not start <= f.start_ns < end]
            self._found.append(_Stall("compilation", start, end - start, step, None, path, phase, reason))

    def _wrap_torch(self) -> None:
        """Wrap torch.save now: later the script may have imported the original under a name of its own."""
        import torch

        # One function with two names; pickle uses the second.
        save = self._timed(torch.save, lambda _obj=None, f=None, *_, **__: f)
        put(torch, "save", save)
        put(torch.serialization, "save", save)
        # Two names each, too: pickle finds a function of `os` in `posix`.
        posix = sys.modules["posix"]
        for name in ("replace", "rename"):
            move = self._timed_if_saved(getattr(os, name))
            put(os, name, move)
            put(posix, name, move)

    def _wrap_distributed(self) -> None:
        # The module is large: we never import it. Functions that the script imported from it earlier are not wrapped.
        module: Any = sys.modules.get("torch.distributed.checkpoint")
        # While it is being imported, its functions are missing.
        if module is None or not hasattr(module, "async_save"):
            return
        self._distributed_wrapped = True
        for name in ("save", "async_save"):
            put(module, name, self._timed(getattr(module, name), lambda *_, **kwargs: kwargs.get("checkpoint_id")))

    def _timed(self, original: Callable[..., Any], path_of: Callable[..., Any]) -> Any:
        """Wrap a function that saves; `path_of` returns its path argument, which may be of any type."""

        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            if self._recorder is None or self._saving or get_ident() != self._thread:
                with passing:
                    return original(*args, **kwargs)
            self._saving = True
            self._recorder.observed.calls.see("save")
            began = time.perf_counter_ns()
            try:
                with passing:
                    return original(*args, **kwargs)
            finally:
                self._saving = False
                self._saved(began, path_of, args, kwargs)

        return save

    def _timed_if_saved(self, original: Callable[..., Any]) -> Any:
        """Wrap a function that renames a file: it counts as saving if that file was saved last."""

        @functools.wraps(original)
        def move(src: Any, *args: Any, **kwargs: Any) -> Any:
            if self._recorder is None or self._saved_as is None or self._saving or get_ident() != self._thread:
                return original(src, *args, **kwargs)
            began = time.perf_counter_ns()
            try:
                return original(src, *args, **kwargs)
            finally:
                self._moved(began, src)

        return move

    @guarded
    def _moved(self, began: int, src: Any) -> None:
        took = time.perf_counter_ns() - began
        if _named(src) == self._saved_as and self._found and self._found[-1].kind == "checkpoint":
            self._found[-1] = replace(self._found[-1], dur_ns=self._found[-1].dur_ns + took)

    @guarded
    def _saved(self, began: int, path_of: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._saved_as = path = _named(path_of(*args, **kwargs))
        known = len(self._found)
        self._add("checkpoint", began, path=redaction.text(path) if path is not None else None)
        if len(self._found) > known:
            values, storage = _sizes(args[0] if args else kwargs.get("obj"))
            self._found[-1] = replace(self._found[-1], values_bytes=values, storage_bytes=storage)

    def fail(self, error: Exception) -> None:
        """Switch off because a hook failed."""
        if self._recorder is not None:
            self._recorder.drop(self, error)

    def _write(self) -> None:
        if not self._found or self._log is None:
            return
        # A garbage collection may add to the list meanwhile: take only what is there now.
        count = len(self._found)
        found = self._found[:count]
        del self._found[:count]
        if self._lines >= _MOST_FULL:
            found = _summed(found)
        self._lines += len(found)
        self._log.write("".join(json.dumps(vars(f), separators=(",", ":")) + "\n" for f in found))


def _sizes(saved: Any) -> tuple[int, int]:
    """Return how many bytes the tensors have that a dictionary or a list holds, and their storages, which are saved."""
    values: dict[tuple[Any, ...], int] = {}
    storages: dict[int, int] = {}
    left = [saved]
    while left and len(values) < _MOST_TENSORS:
        one = left.pop()
        if isinstance(one, Mapping):
            left += one.values()
        elif isinstance(one, (list, tuple)):
            left += one
        elif hasattr(one, "untyped_storage"):
            with suppress(NotImplementedError, RuntimeError):  # a sparse one, or one of several ranks, has none
                storage = one.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
                values[storage._cdata, one.storage_offset(), one.shape] = one.numel() * one.element_size()
    return sum(values.values()), sum(storages.values())


def _named(path: Any) -> str | None:
    """Return the path of a file that is named by it; None for an open file."""
    return os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else None


def _summed(found: Sequence[_Stall]) -> list[_Stall]:
    """Sum garbage collections of the same generation and phase; other stalls stay as they are."""
    alike: dict[Any, list[_Stall]] = {}
    for n, stall in enumerate(found):
        key = (stall.generation, stall.phase) if stall.kind == "garbage_collection" else n
        alike.setdefault(key, []).append(stall)
    return [replace(same[0], dur_ns=sum(s.dur_ns for s in same), count=len(same)) for same in alike.values()]
