"""Marks the steps of training from inside a rank's process, times their parts, and drives the collectors.

What it is told, hooks.py tells it. Nothing is written before the process trains (its first backward or optimizer step),
so that launchers and loader workers leave no trace. Whatever fails here switches itself off, says so once on stderr,
and leaves the job alone.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import stat
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import get_ident
from time import perf_counter_ns
from typing import Any, Protocol, runtime_checkable

from dlprof.files import write
from dlprof.plain import plain
from dlprof.record.device.device import RankDevice
from dlprof.record.ending import Ending
from dlprof.record.launch.process import started
from dlprof.record.loaders import LoaderSeen, Pass, settings_of
from dlprof.record.log import file_of
from dlprof.record.ranks import find_rank
from dlprof.record.stepping import BACKWARD, FETCH, FORWARD, OPTIMIZER, PHASES, Row, Step

_RANGES = tuple(f"dlprof::{phase}" for phase in PHASES)

# A script that takes this many optimizer steps on one batch has no loop over a loader; its steps are the optimizer's.
# A gradient-accumulating or adversarial loop takes far fewer a batch.
_STEPS_WITHOUT_FETCH = 32

# Collectors hear of steps this often, and in longer intervals the longer the job has run, but at least once a second: a
# crash costs at most so much. What they do for one step alone, with nothing of theirs in the processor's caches, takes
# several times as long as for many.
_TELL_EVERY_NS = 250_000_000
_TELL_SHARE = 40  # the interval is this part of the job so far
_TELL_MOST_NS = 1_000_000_000
_NO_STEP = sys.maxsize

# After so long without a step, those before are saved without the training thread.
_SAVED_NS = 500_000_000

# Steps kept in memory until the process trains: a long validation before training must not grow without bound.
_EARLY_STEPS = 4096

# How long the end of the process waits for a training thread that outlives the script.
_NEXT_STEP_S = 1.0

# A script that makes modules or optimizers as it goes, as meta-learning does: so many of each are told of.
_MOST_SEEN = 100


class Collector(Protocol):
    """One source of measurements inside a rank; made when torch is imported."""

    name: str

    def start(self, recorder: Recorder) -> None:
        """Begin: the process trains, and recorder.folder exists. Runs on the training thread."""

    def step(self, done: Sequence[Step]) -> int | None:
        """Hear of the steps that have ended since last time, the last of them right now. Runs on the training thread.

        Gives the number of the step whose beginning must be heard of at once; None: there is no hurry.
        """

    def stop(self) -> None:
        """End, and leave what is in memory on disk. Runs once, perhaps in a signal handler."""


@runtime_checkable
class FetchWatcher(Protocol):
    """A collector that hears of every batch of the training thread's loaders. What it does must not raise."""

    def begun(self, iterator: Any) -> None:
        """Hear that a loader has given an iterator. Not told of a loader whose iter() is its own."""

    def ask(self, iterator: Any) -> None:
        """Hear that the next batch is about to be asked for, where Pass.asks."""

    def got(self, iterator: Any, step: int, began_ns: int, took_ns: int) -> None:
        """Hear that it is here, and which step it begins."""


@runtime_checkable
class Saver(Protocol):
    """A collector whose rows are brought to the disk also where the training thread makes no step any more."""

    def save(self, done: Sequence[Step]) -> None:
        """Write what has gathered, and the steps that it has not heard of yet; `step` tells it of them once more.

        Runs on a thread of ours, at any time, and may ask nothing of the device.
        """


_STDERR = file_of(2)


def say(text: str) -> None:
    """Put one line of ours on stderr, if there is one: a file that the script has opened in its place is none."""
    with contextlib.suppress(OSError):
        if file_of(2) == _STDERR or not stat.S_ISREG(os.fstat(2).st_mode):
            os.write(2, f"dlprof: {plain(text)}\n".encode(errors="replace"))


class _Hot:
    """What every step touches, side by side: its work leaves nothing of ours in the processor's caches."""

    __slots__ = (
        "_asked_to_stop",
        "_autocast_looks",
        "_done",
        "_fetch_began_ns",
        "_fetch_watcher",
        "_model_id",
        "_newly_asked",
        "_open_ranges",
        "_optimizer_depth",
        "_optimizer_id",
        "_owner",
        "_phases",
        "_since_ns",
        "_steps_since_fetch",
        "_tell_ns",
        "_tell_step",
        "capturing",
        "end_of_step",
        "inside",
        "mark",
        "news",
        "off",
        "ranges",
        "row",
        "started",
    )


class Recorder(_Hot):
    """The one recorder of a process: what the hooks call, and what the collectors read."""

    __slots__ = (
        "_collectors",
        "_ending",
        "_fetched",
        "_has_stopped",
        "_model_ids",
        "_optimizer_ids",
        "_pid",
        "_stopped",
        "_stopping",
        "autocast",
        "device",
        "ended",
        "flops",
        "folder",
        "grad_scaler",
        "graphs",
        "loaders",
        "models",
        "optimizers",
        "perf_ns",
        "pipeline",
        "profiler_woken",
        "rank",
        "restart",
        "run",
        "switched_off",
        "trained_from",
        "unix_ns",
        "warnings",
        "window",
    )

    def __init__(self, run: Path, collectors: Iterable[Callable[[], Collector]]) -> None:
        self.run = run
        self.folder = run
        self.rank = 0
        self.restart = 0
        self.warnings: list[str] = []
        self.mark: str | None = None  # what ends a step: user, loader, optimizer, replay
        self.ended: str | None = None
        self.trained_from = 0  # number of the first step that trained
        self.row = Row(0, 0)
        # One fixed anchor, so that the clock in the files is Unix time and monotonic too.
        before = perf_counter_ns()
        self.unix_ns = time.time_ns()
        self.perf_ns = (before + perf_counter_ns()) // 2

        # What was seen, for the facts; weak, so that nothing lives longer for being watched.
        self.news = False
        self.loaders: list[LoaderSeen] = []
        self.models: list[weakref.ref[Any]] = []
        self.optimizers: list[weakref.ref[Any]] = []
        self.device = RankDevice()
        self.autocast: dict[str, Any] | None = None
        self.grad_scaler = False
        self.graphs = 0  # CUDA graphs that were captured
        self.capturing = False  # one is being captured on the training thread; see graphs.py
        self.profiler_woken = False  # torch's profiler has started its threads in this process
        self.window: dict[str, Any] = {}  # the trace's window and what became of it
        self.flops: dict[str, Any] = {}  # what one step computes, once it was counted
        self.pipeline: dict[str, Any] | None = None  # the pipeline schedule that this rank runs
        self._model_ids: set[int] = set()
        self._model_id = 0  # the last one's
        self._optimizer_ids: set[int] = set()
        self._optimizer_id = 0
        self._autocast_looks = 16

        # True while a module's call needs no look: inside a fetch, a forward or a backward, or when switched off.
        self.inside = False
        # What opens a named range around each phase: the trace while its window is open, NVTX all along.
        self.ranges: list[Callable[[str], Any]] = []
        self.end_of_step: Callable[[], Any] | None = None  # called at each step's end; Step.device keeps what it gives
        self.switched_off: Callable[[], None] | None = None  # called when no step will be heard of any more
        self.off = False
        self.started = False
        self._stopped = False
        self._asked_to_stop: str | None = None  # by another thread than the one that trains
        self._has_stopped = threading.Event()
        self._stopping = (0, 0)
        self._ending: Ending | None = None
        self._pid = os.getpid()
        self._owner = 0
        self._phases: list[int] = []
        self._open_ranges: dict[int, Any] = {}  # by how many phases are open
        self._since_ns = 0  # when the innermost phase was entered or resumed
        self._optimizer_depth = 0
        self._fetched = False
        self._fetch_began_ns = 0
        self._newly_asked = False  # the loader that was asked last is the last of row.unsettled
        self._steps_since_fetch = 0
        self._done: list[tuple[Any, ...]] = []  # a Step's cells, of those that the collectors have not heard of
        self._tell_ns = 0
        self._tell_step = _NO_STEP
        self._fetch_watcher: FetchWatcher | None = None
        self._collectors: tuple[Collector, ...] = ()
        for make in collectors:
            try:
                collector = make()
                if isinstance(collector, FetchWatcher):
                    self._fetch_watcher = collector
                self._collectors += (collector,)
            except Exception as e:  # noqa: BLE001, PERF203 - one collector must not cost the others
                self.warn(f"{getattr(make, '__name__', make)} is off: {_tell(e)}")

    # -- what collectors use

    def warn(self, text: str) -> None:
        """Say something once on stderr and keep it for the report."""
        self.warnings.append(text)
        self.news = True
        say(f"rank {self.rank}: {text}" if self.started else text)

    def unix(self, perf_ns: int) -> int:
        """Return the Unix time, in ns, of a perf_counter reading."""
        return perf_ns - self.perf_ns + self.unix_ns

    @property
    def phase(self) -> int | None:
        """The innermost phase that the training thread is in; None: in none of them."""
        return self._phases[-1] if self._phases else None

    @property
    def fetching(self) -> bool:
        """Return whether the caller is on the training thread, inside next() or iter() of a loader."""
        phases = self._phases
        return bool(phases) and phases[-1] == FETCH and not self.off and get_ident() == self._owner

    def open_range(self, name: str) -> Any:
        """Open a named range if somebody traces; its __exit__ closes it. None: nobody does."""
        if _is_compiling() or not self.ranges:
            return None
        try:
            return self._open(name)
        except Exception as e:  # noqa: BLE001 - the script goes on
            self._fail(e)
            return None

    # -- phases

    # The usual case is written out in these, nested phases and ranges go by _push: a step's work leaves nothing of ours
    # in the processor's caches, and a function more to call is more to bring there than to run.

    def begin(self, phase: int) -> bool:
        """Enter a phase; False: not ours to time, and end() must not be called."""
        try:
            if self.off or (get_ident() != self._owner and not self._mine(phase)):
                return False
            row = self.row
            if phase == BACKWARD:
                if self._phases and self._phases[-1] == BACKWARD:
                    return False
                row.backwards += 1
                if not self.started:
                    self._start()
            if self._phases or self.ranges:
                self._push(phase)
            else:
                self._phases.append(phase)
                self.inside = phase != OPTIMIZER
                self._since_ns = perf_counter_ns()
        except Exception as e:  # noqa: BLE001 - the script goes on
            self._fail(e)
            return False
        return True

    def begin_forward(self, module: Any) -> bool:
        """Enter an outermost module's call."""
        try:
            if self.off or (get_ident() != self._owner and not self._mine(FORWARD)):
                return False
            row = self.row
            now = perf_counter_ns()
            if not row.forwards:
                row.lead_ns = now - row.start_ns - row.parts[FETCH]
            row.forwards += 1
            if id(module) != self._model_id:
                self._see_model(module)
            if self._autocast_looks:
                self._look_at_autocast()
            if self._phases or self.ranges:
                self._push(FORWARD)
            else:
                self._phases.append(FORWARD)
                self.inside = True
                self._since_ns = now
        except Exception as e:  # noqa: BLE001 - the script goes on
            self._fail(e)
            return False
        return True

    def begin_fetch(self, iterator: Any, *, first: bool) -> bool:
        """Enter next() of a loader's iterator; ends the step before it, if anything was done with its batch."""
        try:
            if self.off or (get_ident() != self._owner and not self._mine(FETCH)):
                return False
            row = self.row
            if self._phases or self.mark != "loader":
                if FETCH in self._phases:
                    return False
                self._enter_loader()
            else:
                self._steps_since_fetch = 0
                if row.backwards or row.forwards or row.optimizer_steps:
                    self._end_step(perf_counter_ns())
            row.fetches += 1
            if first:
                row.first = 1
            over: Pass = iterator._dlprof_pass or self._adopt(iterator)
            self._newly_asked = False
            if over.unsettled:
                self._unsettle(over)
            if over.asks and self._fetch_watcher is not None:
                self._fetch_watcher.ask(iterator)
            if self._phases or self.ranges:
                self._push(FETCH)
            else:
                self._phases.append(FETCH)
                self.inside = True
                self._since_ns = perf_counter_ns()
            self._fetch_began_ns = self._since_ns
        except Exception as e:  # noqa: BLE001 - the script goes on
            self._fail(e)
            return False
        return True

    def end_fetch(self, iterator: Any) -> None:
        """Leave next() of a loader's iterator, which gave a batch."""
        phases = self._phases
        if len(phases) == 1 and phases[0] == FETCH and not self._open_ranges:
            phases.pop()
            now = perf_counter_ns()
            self.row.parts[FETCH] += now - self._since_ns
            self._since_ns = now
            self.inside = self.off
        elif self.end() != FETCH:
            return
        if self._fetch_watcher is not None:
            began = self._fetch_began_ns
            self._fetch_watcher.got(iterator, self.row.number, began, self._since_ns - began)

    def ask(self, iterator: Any) -> None:
        """Hear that one of several batches that make one fetch is about to be asked for."""
        if self._fetch_watcher is not None:
            self._fetch_watcher.ask(iterator)
            self._fetch_began_ns = perf_counter_ns()

    def got(self, iterator: Any) -> None:
        """Hear that it is here."""
        if self._fetch_watcher is not None:
            began = self._fetch_began_ns
            self._fetch_watcher.got(iterator, self.row.number, began, perf_counter_ns() - began)

    def begin_epoch(self) -> bool:
        """Enter iter() of a loader, where its workers start."""
        try:
            if self.off or not self._mine(FETCH) or FETCH in self._phases:
                return False
            self._enter_loader()
            self.row.first = 1
            self._push(FETCH)
            self._fetch_began_ns = self._since_ns
        except Exception as e:  # noqa: BLE001 - the script goes on
            self._fail(e)
            return False
        return True

    def see_iterator(self, loader: Any, iterator: Any) -> None:
        """Remember which loader an iterator belongs to that its iter() gave."""
        try:
            began = self._fetch_began_ns
            self._see_loader(loader, iterator, began, self._since_ns - began)
            if self._fetch_watcher is not None:
                self._fetch_watcher.begun(iterator)
        except Exception as e:  # noqa: BLE001 - the script goes on
            self._fail(e)

    def see_made(self, loader: Any, iterator: Any) -> None:
        """Remember it where iter() is the loader's own, as torchdata's is."""
        try:
            if not self.off and self._mine(FETCH) and FETCH not in self._phases:
                self._see_loader(loader, iterator, perf_counter_ns(), 0)
        except Exception as e:  # noqa: BLE001 - the script goes on
            self._fail(e)

    def end(self) -> int:
        """Leave the innermost phase, and tell which it was; −1: there was none."""
        phases = self._phases
        if not phases:
            return -1
        try:
            if self._open_ranges:
                opened = self._open_ranges.pop(len(phases), None)
                if opened is not None:
                    opened.__exit__(None, None, None)
            phase = phases.pop()
            now = perf_counter_ns()
            self.row.parts[phase] += now - self._since_ns
            self._since_ns = now
            self.inside = phases[-1] != OPTIMIZER or self.off if phases else self.off
        except Exception as e:  # noqa: BLE001 - the script goes on
            self._fail(e)
            return -1
        return phase

    def begin_optimizer(self, optimizer: Any) -> bool:
        """Enter an optimizer's step, and tell whether it is this one's first.

        Only the outermost counts (ZeroRedundancyOptimizer steps another inside).
        """
        try:
            if self.off or (get_ident() != self._owner and not self._mine(OPTIMIZER)):
                return False
            self._optimizer_depth += 1
            if self._optimizer_depth > 1:
                return False
            if not self.started:
                self._start()
            new = id(optimizer) != self._optimizer_id and self._see_optimizer(optimizer)
            if self._phases or self.ranges:
                self._push(OPTIMIZER)
            else:
                self._phases.append(OPTIMIZER)
                self.inside = False
                self._since_ns = perf_counter_ns()
        except Exception as e:  # noqa: BLE001 - the script goes on
            self._fail(e)
            return False
        return new

    def end_optimizer(self) -> None:
        """Leave an optimizer's step; where no loader marks the steps, a step ends here."""
        try:
            if self.off or get_ident() != self._owner or not self._optimizer_depth:
                return
            self._optimizer_depth -= 1
            phases = self._phases
            if self._optimizer_depth or OPTIMIZER not in phases:
                return
            if len(phases) == 1 and not self._open_ranges:
                phases.pop()
                now = perf_counter_ns()
                self.row.parts[OPTIMIZER] += now - self._since_ns
                self._since_ns = now
                self.inside = False
            else:
                while self.end() not in (OPTIMIZER, -1):
                    pass
            self._stepped()
        except Exception as e:  # noqa: BLE001 - the script goes on
            self._fail(e)

    def user_step(self) -> None:
        """End a step where the script says so (dlprof.step())."""
        if _is_compiling():
            return
        try:
            if self.off or not self._mine(FETCH):
                return
            self.mark = "user"
            self._end_step(perf_counter_ns())
        except Exception as e:  # noqa: BLE001 - the script goes on
            self._fail(e)

    def end_of_epoch(self) -> None:
        """Hear that a loader's iterator had no more."""
        self.row.first = 1
        if self._newly_asked:
            # It gave no batch: what this step does is nothing that it was used for.
            del self.row.unsettled[-1:]  # a step may have ended meanwhile
            self._newly_asked = False

    # -- inner workings

    def _stepped(self) -> None:
        """Count an optimizer's step, which ends a step of training where nothing else does."""
        self.row.optimizer_steps += 1
        if self.capturing:
            return
        self._steps_since_fetch += 1
        stale = self._steps_since_fetch > _STEPS_WITHOUT_FETCH
        if (self.mark is None and not self._fetched) or (self.mark == "loader" and stale):
            self.mark = "optimizer"
        if self.mark == "optimizer":
            self._end_step(perf_counter_ns())

    def _mine(self, phase: int) -> bool:
        """Return whether this thread is the one that trains. Until training is seen, that is the first one heard of."""
        thread = get_ident()
        if thread == self._owner:
            return True
        if self._owner and (self.started or phase in (FETCH, FORWARD)):
            return False
        self._owner = thread
        self._phases.clear()
        self._open_ranges.clear()
        self._done.clear()
        self._optimizer_depth = 0
        self.inside = False
        self.row = Row(0, perf_counter_ns())
        return True

    def _see_loader(self, loader: Any, iterator: Any, began_ns: int, took_ns: int) -> None:
        seen = next((s for s in self.loaders if s.loader() is loader), None)
        if seen is None:
            settings = settings_of(loader)
            # A script that makes its loader anew each epoch has one loader.
            same = (s for s in self.loaders if s.loader() is None and s.settings == settings)
            seen = next(same, None)
            if seen is not None:
                seen.loader = weakref.ref(loader)
        if seen is None:
            seen = LoaderSeen(loader, settings)
            self.loaders.append(seen)
            self.news = True
        iterator._dlprof_pass = Pass(seen, began_ns, took_ns)

    def _adopt(self, iterator: Any) -> Pass:
        """Return a pass to an iterator that was not seen being made."""
        over: Pass = Pass(None, perf_counter_ns(), 0)
        iterator._dlprof_pass = over
        return over

    def _unsettle(self, over: Pass) -> None:
        """Remember to tell a loader what its batches are used for, as long as it is not known to train."""
        seen = over.loader
        over.unsettled = seen is not None and seen.role != "train"
        if seen is not None and over.unsettled and seen not in self.row.unsettled:
            self.row.unsettled.append(seen)
            self._newly_asked = True

    def _enter_loader(self) -> None:
        if self._phases == [OPTIMIZER]:
            # A step() that raised never told us that it ended.
            self.end()
            self._optimizer_depth = 0
        self._fetched = True
        self._steps_since_fetch = 0
        if self.mark is None or (self.mark in ("optimizer", "replay") and not self.loaders):
            self.mark = "loader"
        if self.mark != "user" and self.row.worked and not self._phases:
            self._end_step(perf_counter_ns())

    def _push(self, phase: int) -> None:
        phases = self._phases
        now = perf_counter_ns()
        if phases:
            self.row.parts[phases[-1]] += now - self._since_ns
        phases.append(phase)
        self.inside = phase != OPTIMIZER
        if self.ranges:
            self._open_ranges[len(phases)] = self._open(_RANGES[phase])
        self._since_ns = now

    def _open(self, name: str) -> contextlib.ExitStack:
        opened = contextlib.ExitStack()
        for make in self.ranges:
            opened.enter_context(make(name))
        return opened

    def _end_step(self, now: int) -> None:
        """End the step; the next one begins. Does nothing while a graph is captured: that runs nothing."""
        if self.capturing:
            return
        row, parts = self.row, self.row.parts
        if self._phases:
            parts[self._phases[-1]] += now - self._since_ns
            self._since_ns = now
        if row.unsettled and row.settle():
            self.news = True
        device = self.end_of_step() if self.end_of_step is not None else None
        number = row.number
        done = (
            number,
            row.start_ns,
            now - row.start_ns,
            row.lead_ns,
            parts[FETCH],
            parts[FORWARD],
            parts[BACKWARD],
            parts[OPTIMIZER],
            row.fetches,
            row.forwards,
            row.backwards,
            row.optimizer_steps,
            row.first,
            row.profiled,
            device,
        )
        row.number = number + 1
        row.start_ns = now
        row.lead_ns = -1
        parts[FETCH] = parts[FORWARD] = parts[BACKWARD] = parts[OPTIMIZER] = 0
        row.fetches = row.forwards = row.backwards = row.optimizer_steps = row.first = row.profiled = 0
        if self.started:
            self._done.append(done)
            if now >= self._tell_ns or number + 1 >= self._tell_step or self.news:
                self._tell_collectors()
            if self._asked_to_stop is not None:
                self.stop(self._asked_to_stop)
        elif len(self._done) < _EARLY_STEPS:
            self._done.append(done)

    def _tell_collectors(self) -> None:
        if not self._done or (self.ended is None and (self.capturing or self.device.capturing())):
            return  # what they would ask, start or stop on the device makes a capture fail: at the next step, then
        ended, self._done = self._done, []
        if self.news:
            self.device.look(self.models, self.optimizers)
        done = list(map(Step._make, ended))
        now = done[-1].start_ns + done[-1].dur_ns
        self._tell_ns = now + min(max((now - self.perf_ns) // _TELL_SHARE, _TELL_EVERY_NS), _TELL_MOST_NS)
        self._tell_step = _NO_STEP
        for collector in self._collectors:
            try:
                asked = collector.step(done)
            except Exception as e:  # noqa: BLE001, PERF203 - see _guard
                self._drop(collector, e)
            else:
                self._tell_step = min(self._tell_step, _NO_STEP if asked is None else asked)

    def _see_model(self, module: Any) -> None:
        self._model_id = id(module)
        if self._model_id in self._model_ids or len(self._model_ids) >= _MOST_SEEN:
            return  # a script that makes modules as it goes: they are not its model
        self._model_ids.add(self._model_id)
        if next(module.parameters(), None) is not None:
            self.models.append(weakref.ref(module))
            self.news = True

    def _see_optimizer(self, optimizer: Any) -> bool:
        """Keep an optimizer for the facts, and tell whether it was new."""
        self._optimizer_id = id(optimizer)
        if self._optimizer_id in self._optimizer_ids or len(self._optimizer_ids) >= _MOST_SEEN:
            return False
        self._optimizer_ids.add(self._optimizer_id)
        self.optimizers.append(weakref.ref(optimizer))
        self.news = True
        return True

    def _look_at_autocast(self) -> None:
        import torch

        self._autocast_looks -= 1
        for device in ("cuda", "cpu"):
            if torch.is_autocast_enabled(device):
                dtype = str(torch.get_autocast_dtype(device)).replace("torch.", "")
                self.autocast = {"enabled": True, "dtype": dtype}
                self._autocast_looks = 0
                self.news = True
                return
        self.autocast = {"enabled": False, "dtype": None}

    def _start(self) -> None:
        """Begin recording: the process has just begun to train."""
        if self.capturing:
            return  # what is captured is replayed later, and the collectors may ask nothing of the device now
        info = sys.modules.get("torch.utils.data._utils")
        if info is not None and info.worker.get_worker_info() is not None:
            self._switch_off()
            return
        self.rank = find_rank()
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
        self.restart = int(restart) if restart.isdigit() else 0
        name = f"{self.rank:05d}" + (f".r{self.restart}" if self.restart else "")
        ranks = self.run / "ranks"
        try:
            ranks.mkdir(parents=True, exist_ok=True)
            try:
                (ranks / name).mkdir()
            except FileExistsError:
                taken, name = name, f"{name}.{os.getpid()}"
                (ranks / name).mkdir()
                if _recorded_by(ranks / taken) == os.getpid():
                    self.warn(f"the script replaced itself (os.exec): what was before is in ranks/{taken}, not here")
                else:
                    self.warn(f"another process records as ranks/{taken}: this one is in ranks/{name}")
            self._leave_word(name)
        except OSError as e:
            self._switch_off()
            say(f"cannot record: {_tell(e)}; the job goes on without it")
            return
        self.folder = ranks / name
        self.started = True
        self.trained_from = self.row.number
        self._stop_with_process()
        self.device.look(self.models, self.optimizers)
        for collector in self._collectors:
            self._guard(collector, collector.start, self)
        self._tell_collectors()
        self._tell_ns = 0

    def _leave_word(self, name: str) -> None:
        """Tell the loaders' workers, which were started before, where this rank records; see ranks.py.

        And whoever sees to what the job has left, which process this is: its environment may be written over later.
        """
        host = self.run / "hosts" / os.uname().nodename
        host.mkdir(parents=True, exist_ok=True)
        word = f"{name} {os.environ.get('DLPROF_SUPERVISOR')} {started(os.getpid())}"
        write(host / f"rank-{os.getpid()}", word)

    def _stop_with_process(self) -> None:
        atexit.register(self.stop, "exit")
        multiprocessing = sys.modules.get("multiprocessing.process")
        if multiprocessing is not None and multiprocessing.parent_process() is not None:
            # Children of multiprocessing leave without atexit.
            from multiprocessing.util import Finalize

            Finalize(None, self.stop, args=("exit",), exitpriority=10)
        self._ending = Ending(self)
        self._ending.start()

    @property
    def traced(self) -> bool:
        """Return whether a trace is being recorded."""
        return bool(self.ranges)

    @property
    def stopping(self) -> tuple[int, int]:
        """The thread that writes the files right now, and since when (perf_counter, ns); zeros where none does."""
        return self._stopping

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the recording, and tell whether its files are there."""
        return self._has_stopped.wait(seconds)

    def save(self) -> None:
        """Bring the last steps to the disk where the training thread has ended none for a while: it may hang."""
        if not self.started or self._stopped or perf_counter_ns() - self.row.start_ns < _SAVED_NS:
            return
        done = list(map(Step._make, self._done.copy()))
        for collector in self._collectors:
            if isinstance(collector, Saver):
                collector.save(done)

    def stop(self, ended: str, *, at_once: bool = False) -> None:
        """End the recording: the last step is closed, and every collector leaves its files. Does nothing twice.

        The training thread does it best; another one lets it, for a moment, unless it is to be done at once.
        """
        if self._stopped or not self.started or os.getpid() != self._pid:
            return
        if (
            not at_once
            and self._owner not in (0, get_ident())
            and any(t.ident == self._owner for t in threading.enumerate())
        ):
            # The training thread is still at it, as daemon threads are.
            self._asked_to_stop = ended
            self._has_stopped.wait(_NEXT_STEP_S)
            if self._stopped:
                return
        self._stopped = True
        self._stopping = (get_ident(), perf_counter_ns())
        self.ended = ended
        try:
            if not self.off and (self.row.worked or self.row.fetches):
                self.row.first = 1  # cut off by the end of the job: no step to compare with others
                self._end_step(perf_counter_ns())
            self._tell_collectors()
        except Exception as e:  # noqa: BLE001 - the process ends as it would without us
            self._fail(e)
        self._switch_off()
        # A second Ctrl-C, while the first one's end is being written: at once, then, and without a traceback of ours.
        with contextlib.suppress(KeyboardInterrupt):
            # Backwards: facts close the list, since they tell how the others ended.
            for collector in reversed(self._collectors):
                self._guard(collector, collector.stop)
        self._stopping = (0, 0)
        self._has_stopped.set()
        if self._ending is not None:
            self._ending.finished()

    def _guard(self, collector: Collector, call: Callable[..., None], *args: Any) -> None:
        try:
            call(*args)
        except Exception as e:  # noqa: BLE001 - one collector must not cost the others, nor the job
            self._drop(collector, e)

    def _drop(self, collector: Collector, error: Exception) -> None:
        self._collectors = tuple(c for c in self._collectors if c is not collector)
        if isinstance(collector, FetchWatcher):
            self._fetch_watcher = None
        self.warn(f"{collector.name} is off: {_tell(error)}; the job goes on without it")

    def _fail(self, error: Exception) -> None:
        self._switch_off()
        self.warn(f"recording is off: {_tell(error)}; the job goes on without it")

    def _switch_off(self) -> None:
        self.off = True
        self.inside = True
        self.ranges.clear()
        self.end_of_step = None
        if self.switched_off is not None:
            with contextlib.suppress(Exception):
                self.switched_off()

    def forked(self) -> None:
        """Run in a fork's child: a child of a training process is no rank; another may yet become one."""
        self._pid = os.getpid()
        self._owner = 0
        if self.started:
            self._switch_off()
            self._stopped = True
            self._collectors = ()
            if self._ending is not None:
                self._ending.forked()
        if self.profiler_woken:
            _leave_without_destructors()


def _recorded_by(rank: Path) -> int | None:
    """Return the process whose recording a folder holds."""
    try:
        pid = json.loads((rank / "facts.json").read_text())["pid"]
    except (OSError, ValueError, KeyError):
        return None
    return pid if isinstance(pid, int) else None


def _tell(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if not isinstance(error, OSError) else str(error)


def _leave_without_destructors() -> None:
    """Let this fork's child end once Python is done, before C++ destructors join threads that only the parent has.

    Kineto's do, once a profiler was prepared: the child then aborts or hangs in exit(). Loader workers never get there.
    """
    with contextlib.suppress(AttributeError):  # a C library without on_exit
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)


def _is_compiling() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_compiling())


def _hidden(hook: Any, *, with_callees: bool = False) -> Any:
    """Keep Dynamo from compiling a hook's frame, and give the hook. What it calls is compiled as ever, unless told not.

    The same as torch.compiler.disable, without importing Dynamo where nobody compiles.
    """
    import torch._C

    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "skip_code"):  # before FrameExecStrategy came: never with the callees
        frames.skip_code(hook.__code__)
    else:
        callees = frames._FrameAction.SKIP if with_callees else frames._FrameAction.DEFAULT
        frames.set_code_exec_strategy(hook.__code__, frames._FrameExecStrategy(frames._FrameAction.SKIP, callees))
    return hook
