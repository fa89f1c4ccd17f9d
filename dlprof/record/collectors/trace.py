"""The deep layer: torch's own profiler over a short window of steps, and out of its way where the script profiles."""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import get_ident
from typing import Any

from dlprof import cupti
from dlprof.record.device.profiler import Kineto
from dlprof.record.hooks import put
from dlprof.record.recorder import Recorder
from dlprof.record.stepping import Step, kind_of

_DEFAULT_WINDOW = "10,2,5"

# On a device the profiler's start empties the queue of launches, and the host's first steps are short until it is full
# again: the host then runs ahead as it does in the rest of the job. In a V100's trace (traces of GPU.md §1) its steps
# took 35, 72, 96, 96 and 96 ms. So the window goes on, for a few steps at most, while the last step is shorter than
# this part of the steps before the window, or this much off the traced one before it.
_SETTLED, _CHANGED = 0.9, 0.1
_MOST_MORE = 3
_COMPARED = 64  # untraced steps


class Trace:
    """Writes trace.json for the steps of the window 'skip,warmup,active', counted from the first step that trains."""

    name = "trace"

    def __init__(self) -> None:
        text = os.environ.get("DLPROF_WINDOW") or _DEFAULT_WINDOW
        # Only one of the two can listen to the device: a window of ours would leave nsys, or us, without its events.
        if text != "off" and os.environ.get("NSYS_PROFILING_SESSION_ID"):
            text = "nsys"
        self._done = text in ("off", "nsys")
        self.window: dict[str, Any] = {"skip": None, "warmup": None, "active": None}
        self.window.update(state=text if self._done else "waiting", first_step=None, last_step=None, export_ns=None)
        # errors: what Kineto and CUPTI said; None: nobody listened, as on a CPU.
        self.window.update(extended=0, cupti_torn_down=None, errors=None)
        self._recorder: Recorder | None = None
        self._profiler: Any = None
        self._thread = 0  # that the profiler was prepared in
        self._range: Any = None
        self._recording = False
        self._opening = False
        self._settle = 0  # steps after the window that still feel it
        self._theirs: set[int] = set()
        self._kineto: Kineto | None = None
        self._on_device = False
        self._untraced: deque[int] = deque(maxlen=_COMPARED)  # ns of the last steps of training before the window
        self._traced: list[int] = []
        if not self._done:
            skip, warmup, active = (int(part) for part in text.split(","))
            self.window.update(skip=skip, warmup=warmup, active=active)
            self._watch_profilers()

    def start(self, recorder: Recorder) -> None:
        """Open the window at once if it skips nothing."""
        self._recorder = recorder
        recorder.window = self.window
        if not self._done and self.window["skip"] == 0:
            self._advance(recorder, recorder.clock.row.number)

    def step(self, done: Sequence[Step]) -> int | None:
        """Move the window on to the step that has just begun."""
        recorder = self._recorder
        if recorder is None or recorder.ended is not None:
            return None
        if self._settle:
            self._settle -= 1
            recorder.clock.row.profiled = 1
            if not self._settle and self._kineto is not None:
                self._kineto.leave()
        if self._recording:
            self._traced += [step.dur_ns for step in done]
        elif not self._done:
            self._untraced.extend(s.dur_ns for s in done if not s.profiled and not s.first and kind_of(s) == "train")
        if not self._done:
            self._advance(recorder, recorder.clock.row.number)
        if self._done and not self._settle:
            return None
        opens: int = recorder.clock.trained_from + self.window["skip"]
        return max(recorder.clock.row.number + 1, opens)

    def stop(self) -> None:
        """Leave what the open window has."""
        recorder = self._recorder
        if recorder is None or self._profiler is None:
            return
        if get_ident() != self._thread:
            # The script ends while a thread of it still trains: only that thread could stop the profiler.
            self.window["state"] = "failed"
            recorder.warn("the script ended inside the window, with its training thread still running: no trace")
            return
        if recorder.clock.capturing or recorder.device.capturing():
            self.window["state"] = "failed"
            recorder.warn("the script ended inside the window, while it captured a CUDA graph: no trace")
            return
        self._close(recorder, "partial")

    def _advance(self, recorder: Recorder, number: int) -> None:
        window = self.window
        if self._profiler is None:
            if recorder.clock.position < window["skip"]:
                return
            if self._theirs:
                if window["state"] != "yielded":
                    window["state"] = "yielded"
                    recorder.warn("the script runs its own torch profiler: ours waits until it has ended")
                return
            window["first_step"] = number + window["warmup"]
            window["last_step"] = window["first_step"] + window["active"] - 1
            try:
                self._prepare(recorder)
            except Exception:
                self._done = True
                window["state"] = "failed"
                raise
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        recorder.clock.row.profiled = 1
        if number > window["last_step"] and not self._goes_on():
            self._close(recorder, "exported")
            return
        if number >= window["first_step"]:
            self._record(recorder)
            self._range = self._named(f"ProfilerStep#{number}")
            self._range.__enter__()

    def _goes_on(self) -> bool:
        """Return whether the window takes one more step, since the host does not run ahead yet as it otherwise does."""
        if not self._on_device or self.window["extended"] >= _MOST_MORE or not self._traced:
            return False
        last, before = self._traced[-1], self._traced[-2] if len(self._traced) > 1 else self._traced[-1]
        usual = statistics.median(self._untraced) if self._untraced else 0
        if last >= _SETTLED * usual and abs(last - before) <= _CHANGED * before:
            return False
        self.window["extended"] += 1
        self.window["last_step"] += 1
        return True

    def _prepare(self, recorder: Recorder) -> None:
        import torch
        import torch.profiler

        cuda: Any = torch.cuda
        xpu: Any = getattr(torch, "xpu", None)
        kinds: Any = torch.profiler.ProfilerActivity
        make: Any = torch.profiler._KinetoProfile  # type: ignore[attr-defined]

        recorder.clock.row.profiled = 1
        activities = [kinds.CPU]
        # Asking for a device that the script does not use would wake it.
        if cuda.is_available() and cuda.is_initialized():
            activities.append(kinds.CUDA)
        if xpu is not None and xpu.is_available() and xpu.is_initialized():
            activities.append(kinds.XPU)
        self._named = torch.autograd.profiler.record_function
        # Of tiny operators shapes make the traced steps a third longer, and the file half as large again.
        profiler = make(activities=activities, record_shapes=os.environ.get("DLPROF_SHAPES") == "on")
        self._on_device = len(activities) > 1
        self._kineto = Kineto(self._on_device)
        recorder.profiler_woken = True
        try:
            with self._kineto.preparing():
                self._ours(profiler.prepare_trace)
        except Exception:
            self._hear(recorder)
            raise
        self._profiler = profiler
        self._thread = get_ident()

    def _record(self, recorder: Recorder) -> None:
        if not self._recording:
            with self._heard():
                self._ours(self._profiler.start_trace)
            self._recording = True
            recorder.clock.ranges.append(self._named)

    def _close(self, recorder: Recorder, state: str) -> None:
        """Stop the profiler and, if it recorded a step, write the file; the window ends in that state."""
        profiler, self._profiler = self._profiler, None
        recorded, self._recording = self._recording, False
        if recorded and self._named in recorder.clock.ranges:
            recorder.clock.ranges.remove(self._named)
        self._done = True
        self._settle = 1
        recorder.clock.row.profiled = 1
        window = self.window
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if state != "exported":
            window["last_step"] = recorder.clock.row.number - 1 if recorded else None
            window["first_step"] = window["first_step"] if recorded else None
        began = time.perf_counter_ns()
        try:
            # Not where the script's own profiler begins now, which would lose its events, nor where the job ends.
            if state == "exported" and self._on_device and self._kineto is not None:
                window["cupti_torn_down"] = self._kineto.tear_down()
            with self._heard():
                if not recorded:
                    self._ours(profiler.start_trace)
                self._ours(profiler.stop_trace)
                if self._kineto is not None:
                    self._kineto.torn_down(recorder.device.in_use())
                if recorded:
                    path = recorder.folder / "trace.json"
                    _export(profiler, path)
                    window["export_ns"] = time.perf_counter_ns() - began
        except Exception:
            window["state"] = "failed"
            recorder.observed.news = True
            raise
        finally:
            self._hear(recorder)
        if recorded or state == "yielded":
            window["state"] = state
        recorder.observed.news = True

    def _ours(self, call: Callable[[], Any]) -> None:
        """Call the profiler, which synchronises the current device: that must be the rank's, or another one wakes."""
        import torch

        cuda: Any = torch.cuda
        index = self._recorder.device.index if self._recorder is not None else None
        self._opening = True
        try:
            with cuda.device(index) if index is not None else contextlib.nullcontext():
                call()
        finally:
            self._opening = False

    def _heard(self) -> contextlib.AbstractContextManager[None]:
        return self._kineto.heard() if self._kineto is not None else contextlib.nullcontext()

    def _hear(self, recorder: Recorder) -> None:
        """Keep what Kineto has said, and tell the user of what the trace lacks for it."""
        if self._kineto is None:
            return
        self._kineto.close()
        if self._kineto.errors is None:
            return
        errors = self.window["errors"] = cupti.short(self._kineto.errors)
        lost = cupti.loss(errors)
        if lost is not None:
            advice = cupti.remedy(errors)
            recorder.warn(f"the trace may lack what the GPU did: {lost}" + (f"; {advice}" if advice else ""))

    def _yield(self) -> None:
        """Make way for a profiler that the script starts: two at once leave one of them empty."""
        recorder = self._recorder
        if recorder is None or self._profiler is None:
            return
        recorder.warn("the script runs its own torch profiler: ours stops, so that the script's keeps its events")
        self._close(recorder, "yielded")

    def _watch_profilers(self) -> None:
        from torch.autograd.profiler import profile

        prepare: Any = profile._prepare_trace
        leave: Any = profile.__exit__

        @functools.wraps(prepare)
        def _prepare_trace(profiler: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._opening:
                self._theirs.add(id(profiler))
                try:
                    self._yield()
                except Exception as e:  # noqa: BLE001 - the script's profiler comes first
                    if self._recorder is not None:
                        self._recorder.warn(f"our profiler did not stop cleanly: {type(e).__name__}: {e}")
            return prepare(profiler, *args, **kwargs)

        @functools.wraps(leave)
        def __exit__(profiler: Any, *args: Any) -> Any:  # noqa: N807 - what it stands for
            try:
                return leave(profiler, *args)
            finally:
                self._theirs.discard(id(profiler))

        put(profile, "_prepare_trace", _prepare_trace)
        put(profile, "__exit__", __exit__)


def _export(profiler: Any, path: Path) -> None:
    unfinished = path.with_name(path.name + ".tmp")
    try:
        # Kineto leaves line breaks out of a path: by the folder's descriptor it has none.
        fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            profiler.export_chrome_trace(f"/proc/self/fd/{fd}/{unfinished.name}")
        finally:
            os.close(fd)
        # Kineto does not say where the disk was full.
        with unfinished.open("rb") as file:
            file.seek(-min(16, unfinished.stat().st_size), os.SEEK_END)
            if not file.read().rstrip().endswith(b"}"):
                raise OSError("the trace could not be written to its end: is the disk full?")
        unfinished.replace(path)
    except BaseException:
        for left in (unfinished, unfinished.with_name(unfinished.name + ".tmp")):  # ours, and Kineto's own
            left.unlink(missing_ok=True)
        raise
