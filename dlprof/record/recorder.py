"""Records one process: starts and stops the collectors, passes the steps on to them, and ends with the process.

Nothing is written before the process trains (its first backward or optimizer step). What fails here switches itself
off. The rules for code in a rank are in dlprof/record/__init__.py.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import get_ident
from time import perf_counter_ns
from typing import Any, Protocol, runtime_checkable

from dlprof import run_folder
from dlprof.plain import tell, words_of
from dlprof.record.device.gpu import RankDevice
from dlprof.record.failures import Still
from dlprof.record.loaders import FetchWatcher, worker_info
from dlprof.record.log import Log, Part, file_of
from dlprof.record.model.ranges import Ranges
from dlprof.record.ranks import find_rank, is_alone, is_child, make_folder
from dlprof.record.signals import Ending
from dlprof.record.step_clock import NO_STEP, Step, StepClock

# Steps are passed on to the collectors this often, and less often the longer the job has run, but at least once a
# second: a crash loses at most so much. Handling one step alone, with cold processor caches, takes them several times
# as long as handling it among many.
_PASS_ON_EVERY_NS = 250_000_000
_PASS_ON_SHARE = 40  # the interval is this part of the job so far
_PASS_ON_MOST_NS = 1_000_000_000

# After so long without a step, those before are saved without the training thread.
_SAVED_NS = 500_000_000

# How long the end of the process waits for a training thread that outlives the script.
_NEXT_STEP_S = 1.0


class Collector(Protocol):
    """One source of measurements inside a rank; made when torch is imported."""

    name: str

    def start(self, recorder: Recorder) -> None:
        """Begin: the process trains, and recorder.folder exists. Runs on the training thread."""

    def step(self, done: Sequence[Step]) -> int | None:
        """Take the steps that have ended since the last call, the last of them right now. Runs on the training thread.

        Return the number of the step at whose beginning this must be called again; None: there is no hurry.
        """

    def stop(self) -> None:
        """End, and leave what is in memory on disk. Runs perhaps in a signal handler, and again where it has failed."""


@runtime_checkable
class Saver(Protocol):
    """A collector whose rows are brought to the disk also where the training thread makes no step any more."""

    def save(self, done: Sequence[Step]) -> None:
        """Write what has gathered, and the steps that `step` was not called with yet; it will be.

        Runs on a thread of ours, at any time, and must not query the device.
        """


_STDERR = file_of(2)


def say(text: str) -> None:
    """Write one line to stderr, unless the script has closed it or opened a file in its place."""
    with contextlib.suppress(OSError):
        if file_of(2) == _STDERR or not stat.S_ISREG(os.fstat(2).st_mode):
            tell(text)


class Recorder:
    """The one recorder of a process: it drives the collectors, and they read it."""

    def __init__(self, run: Path, collectors: Iterable[Callable[[], Collector]]) -> None:
        self.run = run
        self.folder = run
        self.rank = 0
        self.restart = 0
        self.alone = False  # nothing made this process one of several ranks when it began to train
        self._records: Log | None = None  # what the collectors write line by line
        self.warnings: list[str] = []
        self.ended: str | None = None
        self.cores: frozenset[int] | None = None  # that the process could use when it started
        # One fixed anchor, so that the clock in the files is Unix time and monotonic too.
        before = perf_counter_ns()
        self.unix_ns = time.time_ns()
        self.perf_ns = (before + perf_counter_ns()) // 2

        self.clock = StepClock(self)
        self.observed = self.clock.observed
        self.device = RankDevice()
        self.module_ranges = Ranges(self.clock, self.warn)
        # What collectors leave for each other and for the facts:
        self.window: dict[str, Any] = {}  # the trace's window and what became of it
        self.windows: list[dict[str, Any]] = []  # the later ones, in order
        self.flops: dict[str, Any] = {}  # what one step computes, once it was counted
        self.profiler_woken = False  # torch's profiler has started its threads in this process
        self.switched_off: Callable[[], None] | None = None  # called when no step will be passed on any more
        self.may_begin: Callable[[], bool] | None = None  # asked in each backward pass until it is so

        self.made_in = get_ident()  # the thread that has imported torch
        self._pid = os.getpid()
        self._ending: Ending | None = None
        self._still = Still(self.clock, self.unix)
        self._asked_to_stop: str | None = None  # by another thread than the one that trains
        self._stopped = False
        self.stopping = (0, 0)  # the thread that writes the files right now, and since when (perf_counter, ns)
        self.has_stopped = threading.Event()  # the files are there
        self._collectors: tuple[Collector, ...] = ()
        for make in collectors:
            try:
                collector = make()
                if isinstance(collector, FetchWatcher):
                    self.clock.fetch_watcher = collector
                self._collectors += (collector,)
            except Exception as e:  # noqa: BLE001, PERF203 - one collector must not cost the others
                self.warn(f"{getattr(make, '__name__', make)} is off: {words_of(e)}")

    # -- what collectors use

    def log(self, name: str, lines: str = "") -> Part:
        """Begin a log of this rank, with these lines. Raises OSError where it cannot be written."""
        log = self._part(name)
        log.begin(lines)
        return log

    def keep(self, name: str, text: str) -> None:
        """Append an object of JSON; the last of its name counts. Raises OSError where it cannot be written."""
        self._part(name).write(text + "\n")

    def _part(self, name: str) -> Part:
        self._records = self._records or Log(self.folder / run_folder.RECORDS)
        return Part(self._records, name)

    def warn(self, text: str) -> None:
        """Say something once on stderr and keep it for the report."""
        self.warnings.append(text)
        self.observed.news = True
        say(f"rank {self.rank}: {text}" if self.clock.started else text)

    def drop(self, collector: Collector, error: Exception) -> None:
        """Switch off a collector that failed, in our own call or in a hook; the others and the job go on.

        It is stopped, so that what it has put in place only passes on, and what it has in memory is saved if it can be.
        """
        if collector not in self._collectors:
            return
        self._collectors = tuple(c for c in self._collectors if c is not collector)
        if isinstance(collector, FetchWatcher):
            self.clock.fetch_watcher = None
        self.warn(f"{collector.name} is off: {words_of(error)}; the job goes on without it")
        with contextlib.suppress(Exception):
            collector.stop()

    def unix(self, perf_ns: int) -> int:
        """Return the Unix time, in ns, of a perf_counter reading."""
        return perf_ns - self.perf_ns + self.unix_ns

    # -- what the clock calls

    def begin(self) -> None:
        """Start recording: the process has just begun to train."""
        clock = self.clock
        if clock.capturing:
            return  # what is captured is replayed later, and the collectors must not query the device now
        if self.may_begin is not None:
            if not self.may_begin():
                return
            self.may_begin = None
            clock.done.clear()  # the steps are counted from here on
            clock.row.number = 0
        if worker_info() is not None:
            self.switch_off()
            return
        self.rank = find_rank()
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
        self.restart = int(restart) if restart.isdigit() else 0
        try:
            self.folder = self._make_folder()
        except OSError as e:
            self.switch_off()
            say(f"cannot record: {words_of(e)}; the job goes on without it")
            return
        clock.started = True
        clock.trained_from = clock.row.number
        self._stop_with_process()
        self.device.look(self.observed.models, self.observed.optimizers)
        for collector in self._collectors:
            self._guard(collector, collector.start, self)
        self.pass_on()
        clock.due_ns = 0

    def infer(self) -> None:
        """Start recording a process that only infers; not one that another process has made to work for it."""
        if is_child():
            self.clock.may_infer = False
        else:
            self.begin()

    def steps_due(self) -> None:
        """Pass the steps on, and stop if another thread has asked for it."""
        self.pass_on()
        if self._asked_to_stop is not None:
            self.stop(self._asked_to_stop)

    def pass_on(self) -> None:
        """Pass the steps that have ended on to the collectors; not now where a CUDA graph is captured."""
        clock = self.clock
        if not clock.done or (self.ended is None and (clock.capturing or self.device.capturing())):
            return
        ended, clock.done = clock.done, []
        if self.observed.news:
            self.device.look(self.observed.models, self.observed.optimizers)
        done = list(map(Step._make, ended))
        now = done[-1].end_ns
        clock.due_ns = now + min(max((now - self.perf_ns) // _PASS_ON_SHARE, _PASS_ON_EVERY_NS), _PASS_ON_MOST_NS)
        clock.due_step = NO_STEP
        for collector in self._collectors:
            try:
                due = collector.step(done)
            except Exception as e:  # noqa: BLE001, PERF203 - see drop
                self.drop(collector, e)
            else:
                clock.due_step = min(clock.due_step, NO_STEP if due is None else due)

    def fail(self, error: Exception) -> None:
        """Switch the recording off, since it failed."""
        self.switch_off()
        self.warn(f"recording is off: {words_of(error)}; the job goes on without it")

    # -- what signals.py calls

    def save(self) -> None:
        """Bring the last steps to the disk where the training thread has ended none for a while: it may hang."""
        clock = self.clock
        if not clock.started or self._stopped or perf_counter_ns() - clock.row.start_ns < _SAVED_NS:
            return
        done = list(map(Step._make, clock.done.copy()))
        for collector in self._collectors:
            if isinstance(collector, Saver):
                collector.save(done)
        self._still.look(self.folder)

    def stop(self, ended: str, *, at_once: bool = False) -> None:
        """End the recording: the last step is closed, and every collector leaves its files. Does nothing twice.

        The training thread does it best; another one lets it, for a moment, unless it is to be done at once.
        """
        clock = self.clock
        if self._stopped or not clock.started or os.getpid() != self._pid:
            return
        if (
            not at_once
            and clock.owner not in (0, get_ident())
            and any(t.ident == clock.owner for t in threading.enumerate())
        ):
            # The training thread is still at it, as daemon threads are. In this order: it looks after it sets due_ns.
            self._asked_to_stop = ended
            clock.due_ns = 0
            self.has_stopped.wait(_NEXT_STEP_S)
            if self._stopped:
                return
        self._stopped = True
        self.stopping = (get_ident(), perf_counter_ns())
        self.ended = ended
        try:
            if not clock.off and (clock.row.worked or clock.row.fetches):
                clock.row.first = 1  # cut off by the end of the job: no step to compare with others
                clock.end_step(perf_counter_ns())
            self.pass_on()
        except Exception as e:  # noqa: BLE001 - the process ends as it would without us
            self.fail(e)
        self.switch_off()
        with contextlib.suppress(OSError):
            self._still.end(self.folder, well=ended == "exit")
        # A second Ctrl-C, while the first one's end is being written: at once, then, and without a traceback of ours.
        with contextlib.suppress(KeyboardInterrupt):
            # Backwards: facts close the list, since they describe how the others ended.
            for collector in reversed(self._collectors):
                self._guard(collector, collector.stop)
        if self._records is not None:
            self._records.close()
        self.stopping = (0, 0)
        self.has_stopped.set()
        if self._ending is not None:
            self._ending.finished()

    # -- the ends of it

    def switch_off(self) -> None:
        """Measure nothing from here on."""
        self.clock.switch_off()
        self.module_ranges.stop()
        if self.switched_off is not None:
            with contextlib.suppress(Exception):
                self.switched_off()

    def forked(self) -> None:
        """Reset in a fork's child: a child of a training process is no rank; another may yet become one."""
        self._pid = os.getpid()
        self.clock.owner = 0
        if self.clock.started:
            self.switch_off()
            self._stopped = True
            self._collectors = ()
            if self._ending is not None:
                self._ending.undo()
        if self.profiler_woken:
            _leave_without_destructors()

    def leave(self) -> None:
        """Stop, and take out of the process what ends the recording with it: uninstalled from a running script."""
        self.stop("exit")
        self.switch_off()
        atexit.unregister(self.stop)
        if self._ending is not None:
            self._ending.undo()

    # -- inner workings

    def _make_folder(self) -> Path:
        """Make the rank's folder, and one of another name where a process has it already. Raises OSError."""
        self.alone = is_alone()
        folder, self.rank, taken = make_folder(self.run, self.rank, self.restart, alone=self.alone)
        if taken is not None and _recorded_by(taken) == os.getpid():
            before = taken.relative_to(self.run)
            self.warn(f"the script replaced itself (os.exec): what was before is in {before}, not here")
        elif taken is not None:
            theirs, ours = (one.relative_to(self.run) for one in (taken, folder))
            self.warn(f"another process records as {theirs}: this one is in {ours}")
        return folder

    def _stop_with_process(self) -> None:
        atexit.register(self.stop, "exit")
        if is_child():
            # Children of multiprocessing leave without atexit.
            from multiprocessing.util import Finalize

            Finalize(None, self.stop, args=("exit",), exitpriority=10)
        self._ending = Ending(self)
        self._ending.start()

    def _guard(self, collector: Collector, call: Callable[..., None], *args: Any) -> None:
        try:
            call(*args)
        except Exception as e:  # noqa: BLE001 - see drop
            self.drop(collector, e)


def _recorded_by(rank: Path) -> int | None:
    """Return the process whose recording a folder holds."""
    try:
        pid = json.loads((rank / "facts.json").read_text())["pid"]
    except (OSError, ValueError, KeyError):
        return None
    return pid if isinstance(pid, int) else None


def _leave_without_destructors() -> None:
    """Let this fork's child end once Python is done, before C++ destructors join threads that only the parent has.

    Kineto's do, once a profiler was prepared: the child then aborts or hangs in exit(). Loader workers never get there.
    """
    with contextlib.suppress(AttributeError):  # a C library without on_exit
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)
