"""The trace window: runs torch's profiler for a few steps, and makes way for a profiler of the script.

While the profiler records, exchanges of FSDP's first version are named after the module whose parameters they move.
FSDP1's own ranges do not name it, and it gathers parameters in advance, while another module runs. A range is
"dlprof::all_gather nn.Module: PATH (Class)", or "dlprof::reduce …" for gradients. FSDP2's own ranges name the module.
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
from dlprof.plain import words_of
from dlprof.record import guarded
from dlprof.record.attribution import passing
from dlprof.record.captured import capture_test, unseen_range
from dlprof.record.device.kineto import Kineto
from dlprof.record.further import WARMUP, Agreed, Due, Further
from dlprof.record.hooks import Patch, hidden, put
from dlprof.record.model.names import alive, rows_of
from dlprof.record.model.ranges import Ranges
from dlprof.record.ranks import is_among
from dlprof.record.recorder import Recorder
from dlprof.record.step_clock import Step, kind_of

_DEFAULT_WINDOW = "10,2,5"

# If the user gave no window and steps are slow, the window begins sooner: after this many steps and this much time
# since the first one. It then has one warm-up step, and ends once it has recorded for this long.
_SKIP_LEAST, _SKIP_NS, _WARMUP_SLOW, _RECORD_NS = 3, 3_000_000_000, 1, 5_000_000_000

# On a device, the start of the profiler empties the queue of launches. The host's first steps are short until the queue
# is full again and the host runs ahead as in the rest of the job. In a trace of a V100 (traces of GPU.md §1) they took
# 35, 72, 96, 96 and 96 ms. So the window is extended by a few steps at most, while the last step is shorter than this
# share of the steps before the window, or differs by this share from the traced step before it.
_SETTLED, _CHANGED = 0.9, 0.1
_MOST_MORE = 3
_COMPARED = 64  # untraced steps

# Ranks' clocks differ, so rank 0 decides what depends on time. It says so a step ahead, as others may be by then. A
# rank that it never tells begins by itself after so many times as long.
_AHEAD, _ALONE = 1, 3
_MOST_THEIRS = 64  # times that a profiler of the script's runs


class Trace:
    """Writes trace.json for the steps of the window 'skip,warmup,active', counted from the first step that trains.

    Later windows (further.py) leave trace-2.json, trace-3.json, …
    """

    name = "trace"
    _recorder: Recorder
    _kineto: Kineto  # of the profiler
    _named: Any  # opens a named range in the trace

    def __init__(self) -> None:
        given = os.environ.get("DLPROF_WINDOW")
        text = given or _DEFAULT_WINDOW
        self._by_time = not given
        self._first_ns = 0  # when the first step of training had ended
        # Only one of the two can record the device: with a window of ours, nsys or we would lose events.
        if text != "off" and os.environ.get("NSYS_PROFILING_SESSION_ID"):
            text = "nsys"
        self._done = text in ("off", "nsys")
        self._ranks = os.environ.get("DLPROF_RANKS") or "all"
        self._stands_by = False  # this rank records no trace, and only marks the steps of the window
        self._stands = range(0)  # its steps
        self._stands_ns = 0  # when the first of them began
        skip, warmup, active = (None, None, None) if self._done else map(int, text.split(","))
        self.window: dict[str, Any] = {"skip": skip, "warmup": warmup, "active": active}
        self.window.update(state=text if self._done else "waiting", first_step=None, last_step=None, export_ns=None)
        # errors: what Kineto and CUPTI reported; None if their messages were not read, as on a CPU.
        self.window.update(extended=0, cupti_torn_down=None, errors=None, modules=None)
        self._profiler: Any = None
        self._thread = threading.local()  # data of the thread that prepared the profiler
        self._range: Any = None  # of the current step
        self._recording = False
        self._exchanges: list[Patch] = []  # while it records
        self._now_ns = 0  # when the last step had ended
        self._opening = False
        self._settling = False  # the step after the window is still affected by it
        self._of_inference = False  # whether the last window was of inference
        self._theirs: dict[int, dict[str, Any]] = {}  # the script's profilers that run, by their id
        self._on_device = False
        self._graphs = 0  # that were captured before the profiler was prepared
        self._agreed = Agreed()
        self._further = Further(self._agreed)
        self._is_nsys = text == "nsys"
        self._due: Due | None = None  # the window that the fields above are of; None: the first
        self._agreed_first: int | None = None  # the first step of the window, as rank 0 says
        self._ends = False  # it was decided when the window ends
        self._windows = 0  # that came to nothing before this one
        self._untraced: deque[int] = deque(maxlen=_COMPARED)  # ns of the last steps of training before the window
        self._traced: list[int] = []
        self._wrap_profilers()

    def start(self, recorder: Recorder) -> None:
        """Open the window at once if it skips no steps."""
        self._recorder = recorder
        recorder.window = self.window
        # A job that is ended after so many steps has no time for another window.
        by_itself = self._by_time and not self._done and not os.environ.get("DLPROF_STOP_AFTER")
        self._further.start(recorder, by_itself=by_itself)
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
        if self._done:
            if self._of_inference and clock.trains and self._due is None:
                self._begin_anew()
            elif not self._is_nsys and (due := self._further.due(done)) is not None:
                self._begin_further(due)
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
        if self._profiler is not None or not self._skipping():
            return clock.row.number + 1
        begins = clock.trained_from + self.window["skip"] if self._due is None else self._due.first - WARMUP
        return int(begins)

    def stop(self) -> None:
        """Write what an open window has recorded."""
        # If the script ends while one of its threads still trains, only that thread could stop the profiler.
        self._end("" if hasattr(self._thread, "end") else "with its training thread still running")

    def _end(self, why: str) -> None:
        """Close the window early, unless a reason is given why that is impossible."""
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
            first = self._first_step(number)
            # The rank's pipeline stage is known only when the window is due.
            pipeline = (recorder.observed.pipeline or {}).get("ranks")
            if not is_among(self._ranks, recorder.run, recorder.rank, pipeline):
                window.update(state="not_asked", asked=self._ranks)
                # By so many steps the windows of other ranks may be extended.
                more = _MOST_MORE if recorder.device.index is not None else 0
                self._stands_by, self._stands = True, range(first, first + window["active"] + more)
                self._stand_by(number)
                return
            if self._theirs:
                if window["state"] != "yielded":
                    window["state"] = "yielded"
                    recorder.warn("the script runs its own torch profiler: ours waits until it has ended")
                return
            if full := recorder.device.is_full():
                self._done = True
                window["state"] = "declined"
                advice = "the profiler needs some (smaller batches leave it, or --no-trace)"
                recorder.warn(f"no trace: {full}, and {advice}")
                return
            last = first + window["active"] - 1
            if self._due is not None and window["state"] == "waiting":
                last = self._due.first + window["active"] - 1  # a rank that hears of it late traces what is left
            if last < first:
                self._done = True
                window.update(state="missed", first_step=None, last_step=None)
                return
            window["first_step"], window["last_step"] = first, last
            try:
                self._prepare()
            except Exception:
                self._done = True
                window["state"] = "failed"
                raise
        self._end_range()
        recorder.clock.row.profiled = 1
        ahead = _AHEAD if self._agreed.leads else 0
        long = self._by_time and sum(self._traced) >= _RECORD_NS
        if self._agreed.follows:
            if number > window["last_step"] or (self._by_time and sum(self._traced) >= _RECORD_NS / 2):
                window["last_step"] = self._agreed.read(f"last {self._windows}") or window["last_step"]
        elif long and not self._ends and number - 1 + ahead <= window["last_step"]:
            self._ends = True
            window["last_step"] = number - 1 + ahead
        elif number == window["last_step"] + 1 - ahead and not self._ends:
            self._goes_on()
        if self._recording:
            self._agreed.write(f"last {self._windows}", window["last_step"])
        if number > window["last_step"]:
            self._close("exported")
            return
        if number >= window["first_step"]:
            if not self._recording:
                with self._kineto.listening():
                    self._ours(self._profiler.start_trace)
                self._recording = True
                recorder.clock.ranges.append(self._named)
                recorder.module_ranges.start(alive(recorder.observed.models))
                self._exchanges = name_exchanges(recorder.module_ranges)
            self._range = self._named(f"ProfilerStep#{number}")
            self._range.__enter__()

    def _first_step(self, number: int) -> int:
        """Return the first step to be traced, where the profiler is prepared in this step."""
        window = self.window
        if self._due is not None:
            return max(self._due.first, number)
        slow = self._recorder.clock.position < window["skip"]
        first = number + (min(window["warmup"], _WARMUP_SLOW) if slow else window["warmup"])
        if self._agreed_first is not None:
            return max(self._agreed_first, number)
        if slow and self._agreed.leads:
            first += _AHEAD
            self._agreed.write(f"first {self._windows}", first)
        return int(first)

    def _stand_by(self, number: int) -> None:
        """Mark the steps in which other ranks trace: these are slow then, and this rank waits for them."""
        self._recorder.clock.row.profiled = 1  # including the step in which they export, after their last traced step
        if number == self._stands.start:
            self._stands_ns = self._now_ns
        slow = self._by_time and number > self._stands.start and self._now_ns - self._stands_ns >= _RECORD_NS
        self._done = self._settling = slow or number >= self._stands.stop

    def _skipping(self) -> bool:
        """Return whether the window has not begun yet; if steps are slow, this depends on the time that has passed."""
        clock, skip = self._recorder.clock, self.window["skip"]
        if self._due is not None:
            return clock.row.number < self._due.first - WARMUP
        passed = self._now_ns - self._first_ns if self._first_ns else 0
        if not clock.trains:
            return clock.position < skip or passed < _SKIP_NS  # this may be a validation before training
        slow = self._by_time and clock.position >= _SKIP_LEAST and passed >= _SKIP_NS
        self._agreed.connect(self._recorder.run.name)
        if self._agreed.follows and clock.position < skip:
            if self._by_time and clock.position >= _SKIP_LEAST and passed >= _SKIP_NS / 2:
                self._agreed_first = self._agreed.read(f"first {self._windows}")
            if self._agreed_first is not None:
                return bool(clock.row.number < self._agreed_first - min(self.window["warmup"], _WARMUP_SLOW))
            slow = slow and passed >= _ALONE * _SKIP_NS
        return clock.position < skip and not slow

    def _begin_anew(self) -> None:
        """Wait for the window of training: the trace so far is of a validation before it."""
        self._done = self._of_inference = self._stands_by = False
        self._first_ns = 0
        self._ends, self._agreed_first = False, None
        self._windows += 1
        self._traced, self._untraced = [], deque(maxlen=_COMPARED)
        self.window.update(state="waiting", first_step=None, last_step=None, export_ns=None, extended=0)
        (self._recorder.folder / "trace.json").unlink(missing_ok=True)

    def _begin_further(self, due: Due) -> None:
        """Wait for another window."""
        self._due = due
        self._done = self._stands_by = self._ends = False
        self._by_time = due.why == "slower"  # of slow steps fewer are enough; who asked has said how many
        self._windows += 1
        self._traced, self._untraced = [], deque(maxlen=_COMPARED)
        self.window = dict.fromkeys(self.window) | {"number": due.number, "why": due.why, "trace": None}
        self.window.update(warmup=WARMUP, active=due.steps, first_step=due.first, last_step=due.first + due.steps - 1)
        self.window.update(state="waiting", extended=0)
        self._recorder.windows.append(self.window)
        self._recorder.observed.news = True

    def _end_range(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def _goes_on(self) -> None:
        """Extend the window by one step if the host does not run ahead as usual yet."""
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
        # Requesting a device that the script does not use would initialize it.
        for name in ("cuda", "xpu"):
            device: Any = getattr(torch, name, None)
            if device is not None and device.is_available() and device.is_initialized():
                activities.append(getattr(kinds, name.upper()))
        self._on_device = len(activities) > 1
        self._named = unseen_range()
        # With tiny operators, shapes make the traced steps a third longer and the file half as large again.
        profiler = make(activities=activities, record_shapes=os.environ.get("DLPROF_SHAPES") == "on")
        # torch 2.10 to 2.12 warn on the script's stderr about every profiler that does not accumulate events. Ours
        # claims to do so only while it is prepared: otherwise it would parse all its events when it stops.
        profiler.acc_events = True
        self._graphs = self._recorder.observed.graphs
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
        # In this order: a previous one ends first.
        self._thread.end = _End(functools.partial(self._thread_ends, profiler))
        self._profiler = profiler

    def _close(self, state: str) -> None:
        """Stop the profiler and, if it recorded a step, write the file; the window ends in the given state."""
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
            # Not if the script's own profiler is starting, which would lose its events, nor if the job is ending.
            if state == "exported" and self._on_device:
                captured = recorder.observed.graphs != self._graphs or recorder.device.captures > 0
                window["cupti_torn_down"] = self._kineto.tear_down(captured)
            with self._kineto.listening():
                if not recorded:
                    self._ours(profiler.start_trace)
                self._ours(profiler.stop_trace)
                self._kineto.torn_down(recorder.device.in_use())
                if recorded:
                    name = "trace.json" if self._due is None else f"trace-{self._due.number}.json"
                    _export(profiler, recorder.folder / name)
                    if self._due is not None:
                        window["trace"] = name
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
        """Close the window when its thread ends: only that thread can, and another one may get its number later."""
        clock = self._recorder.clock
        if profiler is self._profiler and not clock.off:
            try:
                if clock.row.worked:
                    clock.row.first = 1  # an incomplete step, as at the end of the job
                    clock.end_step(time.perf_counter_ns())
                self._end("")
            except Exception as e:  # noqa: BLE001 - it would go unnoticed in __del__
                self._recorder.drop(self, e)
            self._done, self._profiler = True, None

    def _end_modules(self) -> None:
        """Stop naming modules, and keep the number and the cost of the ranges."""
        ranges = self._recorder.module_ranges
        ranges.stop()
        for patch in self._exchanges:
            patch.undo()
        try:
            took = ranges.measure() if ranges.count else None
            self.window["modules"] = {"ranges": ranges.count, "ns_each": took}
            rows = rows_of(alive(self._recorder.observed.models), ranges.flops, ranges.moved)
            self._recorder.log("modules", "".join(json.dumps(row) + "\n" for row in rows))
        except Exception as e:  # noqa: BLE001 - it calls the script's own classes
            self._recorder.warn(f"the model's modules are not known: {words_of(e)}")

    def _ours(self, call: Callable[[], Any]) -> None:
        """Call the profiler. It synchronizes the current device, which must be the rank's: another would be woken."""
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
        """Keep Kineto's messages, and warn the user if the trace lacks events because of them."""
        self._kineto.close()
        if self._kineto.errors is None:
            return
        errors = self.window["errors"] = cupti.short(self._kineto.errors)
        lost = cupti.loss(errors)
        if lost is not None:
            advice = cupti.remedy(errors)
            self._recorder.warn(f"the trace may lack what the GPU did: {lost}" + (f"; {advice}" if advice else ""))

    def _wrap_profilers(self) -> None:
        """Stop our profiler if the script starts its own: of two at once, one records nothing."""
        from torch.autograd.profiler import profile

        prepare: Any = profile._prepare_trace
        leave: Any = profile.__exit__

        @functools.wraps(prepare)
        def _prepare_trace(profiler: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._opening:
                self._begin_theirs(profiler)
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
            began = time.perf_counter_ns()
            try:
                with passing:
                    return leave(profiler, *args)
            finally:
                self._end_theirs(profiler, time.perf_counter_ns() - began)

        put(profile, "_prepare_trace", _prepare_trace)
        put(profile, "__exit__", __exit__)

    @guarded
    def _begin_theirs(self, profiler: Any) -> None:
        """Keep from which step on the script's own profiler runs."""
        theirs = {"first_step": self._number(), "last_step": None, "exit_ns": None, "shapes": None}
        self._theirs[id(profiler)] = theirs
        first = self.window if self._due is None else self._recorder.window
        if len(known := first.setdefault("theirs", [])) < _MOST_THEIRS:
            known.append(theirs)

    @guarded
    def _end_theirs(self, profiler: Any, took_ns: int) -> None:
        """Keep its last step, and how long it took to end; None where that included reading its events."""
        theirs = self._theirs.pop(id(profiler), None)
        if theirs is not None:
            parsed = getattr(profiler, "_function_events", None) is not None
            shapes = bool(getattr(profiler, "record_shapes", False))
            theirs.update(last_step=self._number(), exit_ns=None if parsed else took_ns, shapes=shapes)

    def _number(self) -> int:
        recorder = getattr(self, "_recorder", None)
        return 0 if recorder is None else recorder.clock.row.number

    def fail(self, error: Exception) -> None:
        """Know no more of the script's own profilers."""
        self._theirs.clear()
        if self._number():
            self._recorder.warn(f"the script's own profiler is not known: {words_of(error)}")


class _End:
    """Calls a function when the thread that holds this in its local data ends."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __del__(self) -> None:
        self._call()


def _export(profiler: Any, path: Path) -> None:
    unfinished = path.with_name(path.name + ".tmp")
    theirs = unfinished.with_name(unfinished.name + ".tmp")  # Kineto's own file, which it renames when it is complete
    try:
        # Kineto drops line breaks from a path; the path of the folder's descriptor has none.
        fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            profiler.export_chrome_trace(f"/proc/self/fd/{fd}/{unfinished.name}")
        finally:
            os.close(fd)
        if theirs.exists():
            # Kineto does not say why it stopped early. Writing more raises the error: a full disk, or a size limit.
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


# By torch module, class in it ("" if none) and function: the name of its range, and the index of the argument that
# leads to the module. None of these is documented by PyTorch; if one is missing, its ranges are too.
_MOVING = {
    # This includes the views of the gathered parameters; their autograd functions are of the module too.
    ("_flat_param", "FlatParamHandle", "unshard"): ("all_gather", 0),
    ("_runtime_utils", "", "_reduce_grad"): ("reduce", 1),
    ("_runtime_utils", "", "_reduce_grad_no_shard"): ("reduce", 1),
}


def name_exchanges(ranges: Ranges) -> list[Patch]:
    """Open a range around each exchange until the patches are undone. Returns [] if the script does not use FSDP1."""
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


# Names take memory and time. Larger groups use NCCL, whose sizes are in the trace anyway.
_MOST_RANKS = 64


class Routing:
    """Records the sizes of all-to-alls as ranges in the trace: torch's profiler does not record them for gloo.

    Only while the profiler records. "dlprof::all_to_all 3,5>4,1": 3 and 5 rows go to the ranks, 4 and 1 come from them.
    """

    name = "routing"

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        # Now, when torch was just imported: later the script may have imported the original under its own name.
        self._wrap()

    def start(self, recorder: Recorder) -> None:
        """Record sizes from now on, while the profiler records."""
        self._recorder = recorder

    def step(self, done: Sequence[Step]) -> None:
        """Do nothing: the ranges are in the trace."""

    def stop(self) -> None:
        """Stop recording."""
        self._recorder = None

    def _wrap(self) -> None:
        import torch
        import torch.distributed as distributed

        original: Callable[..., Any] | None = getattr(distributed, "all_to_all_single", None)
        if original is None:  # a torch without torch.distributed
            return
        profiler: Any = torch.autograd.profiler
        is_compiling, is_captured, named = torch.compiler.is_compiling, capture_test(), unseen_range()

        @functools.wraps(original)
        def all_to_all_single(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or self._recorder is None or not profiler._is_profiler_enabled or is_captured():
                return original(*args, **kwargs)
            name = self._name(*args, **kwargs)
            with passing, contextlib.nullcontext() if name is None else named(name):
                return original(*args, **kwargs)

        wrapped = hidden(all_to_all_single)
        put(distributed, "all_to_all_single", wrapped)
        put(distributed.distributed_c10d, "all_to_all_single", wrapped)

    def _name(
        self, _output: Any = None, _input: Any = None, takes: Any = None, gives: Any = None, *_: Any, **more: Any
    ) -> str | None:
        """Return the name of a call's range; None if its sizes are unknown."""
        try:
            takes = more.get("output_split_sizes", takes) or ()
            gives = more.get("input_split_sizes", gives) or ()
            if len(takes) > _MOST_RANKS or not all(type(n) is int for n in (*takes, *gives)):
                return None
            return f"dlprof::all_to_all {','.join(map(str, gives))}>{','.join(map(str, takes))}"
        except Exception as e:  # noqa: BLE001 - the script goes on
            if self._recorder is not None:
                self._recorder.drop(self, e)
            return None
