"""The trace window: torch's own profiler over a few steps, and out of its way where the script profiles.

Names the module whose parameters an exchange of FSDP's first version moves, while the profiler records.

Its own ranges do not say whose they are, and it gathers parameters ahead, while another module runs. A range is
"dlprof::all_gather nn.Module: PATH (Class)", or "dlprof::reduce …" of gradients. FSDP2's own ranges name the module.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import get_ident
from typing import Any

from dlprof import cupti
from dlprof.files import write
from dlprof.plain import words_of
from dlprof.record.calls.attribution import passing
from dlprof.record.captured import capture_test, unseen_range
from dlprof.record.device.profiler import Kineto
from dlprof.record.hooks import Patch, hidden, put
from dlprof.record.model.names import rows_of
from dlprof.record.model.ranges import Ranges
from dlprof.record.ranks import is_among
from dlprof.record.recorder import Recorder
from dlprof.record.stepping import Step, kind_of

_DEFAULT_WINDOW = "10,2,5"

# Unless a window was asked for, one of slow steps begins sooner: after so many steps, once the job has gone on for so
# long since its first one. It then warms up for one step, and traces no more steps once it has recorded for so long.
_SKIP_LEAST, _SKIP_NS, _WARMUP_SLOW, _RECORD_NS = 3, 3_000_000_000, 1, 5_000_000_000

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
    _recorder: Recorder
    _kineto: Kineto  # of the profiler
    _named: Any  # opens a named range in the trace

    def __init__(self) -> None:
        asked = os.environ.get("DLPROF_WINDOW")
        text = asked or _DEFAULT_WINDOW
        self._by_time = not asked
        self._first_ns = 0  # when the first step of training had ended
        # Only one of the two can listen to the device: a window of ours would leave nsys, or us, without its events.
        if text != "off" and os.environ.get("NSYS_PROFILING_SESSION_ID"):
            text = "nsys"
        self._done = text in ("off", "nsys")
        self._asked_of = os.environ.get("DLPROF_RANKS") or "all"
        self._stands_by = False  # the window of a rank that was asked for no trace
        self._stands = range(0)  # its steps
        self._stands_ns = 0  # when the first of them began
        skip, warmup, active = (None, None, None) if self._done else map(int, text.split(","))
        self.window: dict[str, Any] = {"skip": skip, "warmup": warmup, "active": active}
        self.window.update(state=text if self._done else "waiting", first_step=None, last_step=None, export_ns=None)
        # errors: what Kineto and CUPTI reported; None: nobody listened, as on a CPU.
        self.window.update(extended=0, cupti_torn_down=None, errors=None, modules=None)
        self._profiler: Any = None
        self._thread = threading.local()  # what the thread that the profiler was prepared in has alone
        self._range: Any = None  # of the step that is under way
        self._recording = False
        self._exchanges: list[Patch] = []  # while it records
        self._now_ns = 0  # when the last step had ended
        self._opening = False
        self._settling = False  # the step after the window still feels it
        self._of_inference = False  # the window that was opened last
        self._theirs: set[int] = set()
        self._on_device = False
        self._untraced: deque[int] = deque(maxlen=_COMPARED)  # ns of the last steps of training before the window
        self._traced: list[int] = []
        if not self._done:
            self._watch_profilers()

    def start(self, recorder: Recorder) -> None:
        """Open the window at once if it skips nothing."""
        self._recorder = recorder
        recorder.window = self.window
        if self.window["skip"] == 0:
            self._advance(recorder.clock.row.number)

    def step(self, done: Sequence[Step]) -> int | None:
        """Move the window on to the step that has just begun."""
        clock = self._recorder.clock
        if self._recorder.ended is not None:
            return None
        if self._settling:
            self._settling = False
            clock.row.profiled = 1
            if not self._stands_by:
                self._kineto.leave()
        if self._of_inference and clock.trains and self._done and not self._settling:
            self._begin_anew()
        self._now_ns = done[-1].end_ns
        if not self._first_ns:
            self._first_ns = next((s.end_ns for s in done if s.number >= clock.trained_from), 0)
        if self._recording:
            self._traced += [step.dur_ns for step in done]
        elif not self._done:
            self._untraced.extend(s.dur_ns for s in done if not s.profiled and not s.first and kind_of(s) == "train")
        if not self._done:
            self._advance(clock.row.number)
        if self._done and not self._settling:
            return None
        waits = self._profiler is None and self._skipping()
        return int(clock.trained_from + self.window["skip"]) if waits else clock.row.number + 1

    def stop(self) -> None:
        """Leave what the open window has."""
        # The script ends while a thread of it still trains: only that thread could stop the profiler.
        self._end("" if hasattr(self._thread, "end") else "with its training thread still running")

    def _end(self, why: str) -> None:
        """Close the window early, unless there is a reason why that cannot be."""
        recorder = self._recorder
        if self._profiler is None:
            return
        if not why and (recorder.clock.capturing or recorder.device.capturing()):
            why = "while it captured a CUDA graph"
        if why:
            self.window["state"] = "failed"
            recorder.warn(f"the script ended inside the window, {why}: no trace")
        else:
            self._close("partial")

    def _advance(self, number: int) -> None:
        recorder, window = self._recorder, self.window
        if self._stands_by:
            self._stand_by(number)
            return
        if self._profiler is None:
            if self._skipping():
                return
            self._of_inference = not recorder.clock.trains
            slow = recorder.clock.position < window["skip"]
            first = number + (min(window["warmup"], _WARMUP_SLOW) if slow else window["warmup"])
            if not self._is_asked():
                window.update(state="not_asked", asked=self._asked_of)
                more = _MOST_MORE if recorder.device.index is not None else 0  # that others' windows may take
                self._stands_by, self._stands = True, range(first, first + window["active"] + more)
                self._stand_by(number)
                return
            if self._theirs:
                if window["state"] != "yielded":
                    window["state"] = "yielded"
                    recorder.warn("the script runs its own torch profiler: ours waits until it has ended")
                return
            window["first_step"] = first
            window["last_step"] = first + window["active"] - 1
            try:
                self._prepare()
            except Exception:
                self._done = True
                window["state"] = "failed"
                raise
        self._end_range()
        recorder.clock.row.profiled = 1
        if self._by_time and self._traced and sum(self._traced) >= _RECORD_NS:
            window["last_step"] = number - 1
        elif number > window["last_step"]:
            self._goes_on()
        if number > window["last_step"]:
            self._close("exported")
            return
        if number >= window["first_step"]:
            if not self._recording:
                with self._kineto.listening():
                    self._ours(self._profiler.start_trace)
                self._recording = True
                recorder.clock.ranges.append(self._named)
                recorder.module_ranges.start(self._models())
                self._exchanges = name_exchanges(recorder.module_ranges)
            self._range = self._named(f"ProfilerStep#{number}")
            self._range.__enter__()

    def _is_asked(self) -> bool:
        """Return whether --ranks names this rank; only when the window is due is it known which stage it is."""
        recorder = self._recorder
        pipeline = (recorder.observed.pipeline or {}).get("ranks")
        return is_among(self._asked_of, recorder.run, recorder.rank, pipeline)

    def _stand_by(self, number: int) -> None:
        """Mark the steps in which other ranks trace: they are slow then, and this one waits for them."""
        self._recorder.clock.row.profiled = 1  # also the step in which they export, after their last one
        if number == self._stands.start:
            self._stands_ns = self._now_ns
        slow = self._by_time and number > self._stands.start and self._now_ns - self._stands_ns >= _RECORD_NS
        self._done = self._settling = slow or number >= self._stands.stop

    def _skipping(self) -> bool:
        """Return whether the window is still to come; that of a slow job, by the time that has passed."""
        clock, skip = self._recorder.clock, self.window["skip"]
        passed = self._now_ns - self._first_ns if self._first_ns else 0
        if not clock.trains:
            return clock.position < skip or passed < _SKIP_NS  # it may be a validation before training
        slow = self._by_time and clock.position >= _SKIP_LEAST and passed >= _SKIP_NS
        return clock.position < skip and not slow

    def _begin_anew(self) -> None:
        """Wait for training's window: what was traced was a validation before it."""
        self._done = self._of_inference = self._stands_by = False
        self._first_ns = 0
        self._traced, self._untraced = [], deque(maxlen=_COMPARED)
        self.window.update(state="waiting", first_step=None, last_step=None, export_ns=None, extended=0)
        (self._recorder.folder / "trace.json").unlink(missing_ok=True)

    def _end_range(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def _goes_on(self) -> None:
        """Let the window take one more step, if the host does not run ahead yet as it otherwise does."""
        if not self._on_device or self.window["extended"] >= _MOST_MORE or not self._traced:
            return
        before, last = (self._traced[:1] + self._traced)[-2:]
        usual = statistics.median(self._untraced) if self._untraced else 0
        if last >= _SETTLED * usual and abs(last - before) <= _CHANGED * before:
            return
        self.window["extended"] += 1
        self.window["last_step"] += 1

    def _prepare(self) -> None:
        import torch
        import torch.profiler

        kinds: Any = torch.profiler.ProfilerActivity
        make: Any = torch.profiler._KinetoProfile  # type: ignore[attr-defined]
        activities = [kinds.CPU]
        # Asking for a device that the script does not use would wake it.
        for name in ("cuda", "xpu"):
            device: Any = getattr(torch, name, None)
            if device is not None and device.is_available() and device.is_initialized():
                activities.append(getattr(kinds, name.upper()))
        self._on_device = len(activities) > 1
        self._named = unseen_range()
        # Of tiny operators shapes make the traced steps a third longer, and the file half as large again.
        profiler = make(activities=activities, record_shapes=os.environ.get("DLPROF_SHAPES") == "on")
        # torch 2.10 to 2.12 warn on the script's stderr of every profiler that does not accumulate events. Ours passes
        # for one that does while it is prepared, and no longer: it would parse all its events where it stops.
        profiler.acc_events = True
        self._kineto = Kineto(self._on_device, elsewhere=get_ident() != self._recorder.made_in)
        self._recorder.clock.row.profiled = 1
        self._recorder.profiler_woken = True
        try:
            with self._kineto.preparing():
                self._ours(profiler.prepare_trace)
            profiler.profiler.acc_events = False
        except Exception:
            self._report()
            raise
        self._thread.end = _End(functools.partial(self._thread_ends, profiler))  # in this order: one before it goes
        self._profiler = profiler

    def _close(self, state: str) -> None:
        """Stop the profiler and, if it recorded a step, write the file; the window ends in that state."""
        recorder, window = self._recorder, self.window
        profiler, self._profiler = self._profiler, None
        recorded, self._recording = self._recording, False
        self._done = self._settling = True
        recorder.clock.row.profiled = 1
        if recorded and self._named in recorder.clock.ranges:
            recorder.clock.ranges.remove(self._named)
        self._end_range()
        if recorded:
            self._end_modules()
        if state != "exported":
            window["last_step"] = recorder.clock.row.number - 1 if recorded else None
            window["first_step"] = window["first_step"] if recorded else None
        began = time.perf_counter_ns()
        try:
            # Not where the script's own profiler begins now, which would lose its events, nor where the job ends.
            if state == "exported" and self._on_device:
                window["cupti_torn_down"] = self._kineto.tear_down()
            with self._kineto.listening():
                if not recorded:
                    self._ours(profiler.start_trace)
                self._ours(profiler.stop_trace)
                self._kineto.torn_down(recorder.device.in_use())
                if recorded:
                    _export(profiler, recorder.folder / "trace.json")
                    window["export_ns"] = time.perf_counter_ns() - began
        except Exception:
            window["state"] = "failed"
            raise
        else:
            if recorded or state == "yielded":
                window["state"] = state
        finally:
            recorder.observed.news = True
            self._report()

    def _thread_ends(self, profiler: Any) -> None:
        """Close the window with the thread that it was opened in, which alone can; another may have its number then."""
        clock = self._recorder.clock
        if profiler is self._profiler and not clock.off:
            try:
                if clock.row.worked:
                    clock.row.first = 1  # cut off, as a step is by the end of the job
                    clock.end_step(time.perf_counter_ns())
                self._end("")
            except Exception as e:  # noqa: BLE001 - nobody would hear of it
                self._recorder.drop(self, e)
            self._done, self._profiler = True, None

    def _end_modules(self) -> None:
        """Name no more modules, and keep how often and at what cost it was done."""
        ranges = self._recorder.module_ranges
        ranges.stop()
        for patch in self._exchanges:
            patch.undo()
        try:
            took = ranges.measure() if ranges.count else None
            self.window["modules"] = {"ranges": ranges.count, "ns_each": took}
            rows = rows_of(self._models(), ranges.flops, ranges.moved)
            write(self._recorder.folder / "modules.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        except Exception as e:  # noqa: BLE001 - it asks the script's own classes
            self._recorder.warn(f"the model's modules are not known: {words_of(e)}")

    def _models(self) -> list[Any]:
        return [model for ref in self._recorder.observed.models if (model := ref()) is not None]

    def _ours(self, call: Callable[[], Any]) -> None:
        """Call the profiler, which synchronises the current device: that must be the rank's, or another one wakes."""
        import torch

        cuda: Any = torch.cuda
        index = self._recorder.device.index
        self._opening = True
        try:
            with cuda.device(index) if index is not None else contextlib.nullcontext():
                call()
        finally:
            self._opening = False

    def _report(self) -> None:
        """Keep Kineto's messages, and warn the user of what the trace lacks because of them."""
        self._kineto.close()
        if self._kineto.errors is None:
            return
        errors = self.window["errors"] = cupti.short(self._kineto.errors)
        lost = cupti.loss(errors)
        if lost is not None:
            advice = cupti.remedy(errors)
            self._recorder.warn(f"the trace may lack what the GPU did: {lost}" + (f"; {advice}" if advice else ""))

    def _watch_profilers(self) -> None:
        """Make way for a profiler that the script starts: two at once leave one of them empty."""
        from torch.autograd.profiler import profile

        prepare: Any = profile._prepare_trace
        leave: Any = profile.__exit__

        @functools.wraps(prepare)
        def _prepare_trace(profiler: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._opening:
                self._theirs.add(id(profiler))
                if self._profiler is not None:
                    try:
                        self._recorder.warn(
                            "the script runs its own torch profiler: ours stops, so that the script's keeps its events"
                        )
                        self._close("yielded")
                    except Exception as e:  # noqa: BLE001 - the script's profiler comes first
                        self._recorder.drop(self, e)
            with passing:
                return prepare(profiler, *args, **kwargs)

        @functools.wraps(leave)
        def __exit__(profiler: Any, *args: Any) -> Any:  # noqa: N807 - what it stands for
            try:
                with passing:
                    return leave(profiler, *args)
            finally:
                self._theirs.discard(id(profiler))

        put(profile, "_prepare_trace", _prepare_trace)
        put(profile, "__exit__", __exit__)


class _End:
    """Calls a function when the thread ends that has it among its own."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __del__(self) -> None:
        self._call()


def _export(profiler: Any, path: Path) -> None:
    unfinished = path.with_name(path.name + ".tmp")
    theirs = unfinished.with_name(unfinished.name + ".tmp")  # Kineto's own, which it renames once it is whole
    try:
        # Kineto leaves line breaks out of a path: by the folder's descriptor it has none.
        fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            profiler.export_chrome_trace(f"/proc/self/fd/{fd}/{unfinished.name}")
        finally:
            os.close(fd)
        if theirs.exists():
            # Kineto does not report why it came to no end: a full disk, or a limit on the size of files. More would.
            with theirs.open("ab") as file:
                file.write(bytes(1 << 20))
        with unfinished.open("rb") as file:
            file.seek(-min(16, unfinished.stat().st_size), os.SEEK_END)
            if not file.read().rstrip().endswith(b"}"):
                raise OSError("the trace could not be written to its end: is the disk full?")
        unfinished.replace(path)
    except BaseException:
        for left in (unfinished, theirs):
            left.unlink(missing_ok=True)
        raise


# By module of torch's, class there ("": none) and function: what its range is called, and which argument says whose
# parameters it moves. None of these is in PyTorch's documentation; without them the ranges are not there.
_MOVING = {
    # With the views of what was gathered, whose functions are the module's as well.
    ("_flat_param", "FlatParamHandle", "unshard"): ("all_gather", 0),
    ("_runtime_utils", "", "_reduce_grad"): ("reduce", 1),
    ("_runtime_utils", "", "_reduce_grad_no_shard"): ("reduce", 1),
}


def name_exchanges(ranges: Ranges) -> list[Patch]:
    """Open a range around each exchange until the patches are undone; none where the script does not use this FSDP."""
    patches = []
    for (module, kind, name), (moves, place) in _MOVING.items():
        owner: Any = sys.modules.get(f"torch.distributed.fsdp.{module}")
        owner = getattr(owner, kind, None) if kind else owner
        original = vars(owner).get(name) if owner is not None else None
        if original is not None:
            patches.append(put(owner, name, _named(original, ranges, moves, place)))
    return patches


def _named(original: Callable[..., Any], ranges: Ranges, moves: str, place: int) -> Any:
    is_compiling, is_captured = sys.modules["torch"].compiler.is_compiling, capture_test()

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        opened = None
        if not is_compiling() and len(args) > place and not is_captured():
            module = getattr(args[place], "_fully_sharded_module", None)
            opened = None if module is None else ranges.open_exchange(module, moves)
        try:
            with passing:
                return original(*args, **kwargs)
        finally:
            if opened is not None:
                opened.__exit__(None, None, None)

    return hidden(call)
