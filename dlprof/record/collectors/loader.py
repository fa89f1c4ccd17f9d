"""How batches come to the training thread: what it waited for in its loaders, and what each worker did for a batch.

The rank writes loading.jsonl: the wait for every batch, starting and ending an epoch, and what the process itself used
of its cores. Whoever fetches (a worker process, or the training thread where there are none) writes fetches.jsonl. A
worker is started before its rank knows its own folder, so it keeps its lines until the rank has left word of it.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import dlprof
from dlprof.record.loaders import Pass, watch_method
from dlprof.record.log import WRITE_EVERY_NS, Log, file_of
from dlprof.record.ranks import age_of_rank, folder_of_rank
from dlprof.record.recorder import Recorder
from dlprof.record.stepping import Step

# A file may hold so much, and so much more for each second that its rank trains: 14,000 batches in detail, then 8 a
# second. Above that, what one writing has gathered becomes one line of sums.
_BURST_BYTES = 2_000_000
_BYTES_A_SECOND = 1_000

# Rows kept in memory while there is no file yet: most of a validation before training.
_MOST_ROWS = 4_096

# Where the training thread fetches itself, what it used is asked of the kernel only if fetching takes this long.
_WORTH_ASKING_NS = 2_000_000

_Row = tuple[Any, ...]

# Batches ready, batches being made and the worker whose turn it is, where the training thread fetches itself.
_NOBODY = (-1, -1, -1)

# The same for what the kernel has counted, where it is not asked.
_UNASKED = (-1, -1, -1, -1)


class Loader:
    """Writes loading.jsonl and fetches.jsonl: keys and units as in the tables `loading` and `fetches`."""

    name = "loader"

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._off = False
        self._loading = _Log("loading.jsonl", _loading_line, keys=2, sums=6)
        self._fetches = _Log("fetches.jsonl", _fetch_line, keys=2, sums=3)
        self._counters: _Counters | None = None
        self._usage: tuple[int, int, int, int] = (0, 0, 0, 0)
        # Batches that have no rows yet: while one comes, a step's work has left none of our code in the caches.
        self._batches: list[tuple[Pass, int, int, int, tuple[int, int, int], int, tuple[int, ...]]] = []
        self._asked = _NOBODY  # what the iterator said that was asked last
        self._before = _UNASKED  # what the training thread had used when it began to fetch
        self._fetching = False  # this worker does; loaders that its data set asks are no concern of ours
        self._last_fetch_ns = 0
        self._collate_ns = 0
        # Now, when torch was just imported: each worker's interpreter gets here too, or is a copy of one that did.
        self._watch_ends()
        self._unwatched: dict[Any, Any] = {}  # the fetchers' own `fetch`, while it is watched
        self._watch_fetchers()
        os.register_at_fork(after_in_child=self._forked)

    def start(self, recorder: Recorder) -> None:
        """Open the files; of the batches that this process fetches itself the recorder tells."""
        self._unwatch_fetchers()
        self._recorder = recorder
        self._loading.open(recorder.folder)
        self._fetches.open(recorder.folder)
        self._counters = self._counters or _Counters()
        self._usage = (perf_counter_ns(), *self._counters.cores())

    def step(self, done: Sequence[Step]) -> None:
        """Write what has gathered."""
        now = done[-1].start_ns + done[-1].dur_ns
        if now - self._usage[0] >= WRITE_EVERY_NS:
            self._write(now)

    def stop(self) -> None:
        """Write the rest."""
        self._write(perf_counter_ns(), last=True)
        self._recorder = None

    def _write(self, now: int, *, last: bool = False) -> None:
        recorder, counters = self._recorder, self._counters
        if recorder is None or counters is None or self._off:
            return
        try:
            began, *before = self._usage
            self._usage = (now, *counters.cores())
            used = _used(before, self._usage[1:])
            self._tell_batches()
            begin, step = recorder.unix(began), recorder.row.number
            self._loading.rows.append(("usage", -1, begin, step, -1, "", 1, now - began, -1, -1, -1, *used))
            self._loading.write(now, last=last)
            self._fetches.write(now, last=last)
        except Exception:
            self._off = True
            raise

    def _forked(self) -> None:
        """Begin anew in a fork's child, which may be a worker."""
        self._recorder = None
        self._counters = None
        self._batches.clear()
        self._loading.forget()
        self._fetches.forget()
        self._fetching = False
        if not self._off:
            self._watch_fetchers()

    def _fail(self, error: Exception) -> None:
        """Switch off: the batch goes on its way. Of a folder that is gone or full the rank tells, not each worker."""
        recorder = dlprof._recorder
        worker = self._counters is not None and self._counters.worker
        if not self._off and recorder is not None and not (worker and isinstance(error, OSError)):
            recorder.warn(f"{self.name} is off: {type(error).__name__}: {error}; the job goes on without it")
        self._off = True

    # -- the training thread

    def _watch_ends(self) -> None:
        from torch.utils.data import dataloader

        def watched(ending: Any) -> Any:
            @functools.wraps(ending)
            def _shutdown_workers(iterator: Any) -> Any:
                # Also called by __del__, when the interpreter may be half gone: then nothing of ours must run.
                if self._recorder is None or getattr(iterator, "_shutdown", True):
                    return ending(iterator)
                began = perf_counter_ns()
                try:
                    return ending(iterator)
                finally:
                    self._ended(iterator, began, perf_counter_ns() - began)

            return _shutdown_workers

        ours: Any = dataloader._MultiProcessingDataLoaderIter
        ours._shutdown_workers = watched(ours._shutdown_workers)
        watch_method(dataloader._BaseDataLoaderIter, "_shutdown_workers", watched)

    def begun(self, iterator: Any) -> None:
        """Look who fetches in this pass, before its first batch is."""
        if self._off or self._fetching:
            return
        try:
            self._look_at(iterator)
        except Exception as e:  # noqa: BLE001 - the script goes on
            self._fail(e)

    def _look_at(self, iterator: Any) -> Pass:
        over: Pass = iterator._dlprof_pass or Pass(None, perf_counter_ns(), 0)
        iterator._dlprof_pass = over
        fetcher: Any = getattr(iterator, "_dataset_fetcher", None)
        over.fetches = fetcher is not None and _worker_info() is None
        if over.fetches:
            self._counters = self._counters or _Counters()
            fetcher.collate_fn = self._timed_collate(fetcher.collate_fn)
            over.asks = self._last_fetch_ns > _WORTH_ASKING_NS
        over.workers = " ".join(str(w.pid) for w in getattr(iterator, "_workers", ()))
        over.looked_at = True
        return over

    def ask(self, iterator: Any) -> None:
        """Look how many batches are ready, how many are being made, and which worker makes the one that is due."""
        if self._fetching:
            return
        self._asked = _NOBODY
        tasks = getattr(iterator, "_task_info", None)
        try:
            if tasks is None:
                if self._last_fetch_ns > _WORTH_ASKING_NS and self._counters is not None:
                    self._before = self._counters.all()
                return
            outstanding = iterator._tasks_outstanding
            due = tasks.get(iterator._rcvd_idx)
            # Those that came before their turn are kept among the tasks.
            ready = iterator._data_queue.qsize() + len(tasks) - outstanding
            self._asked = (ready, outstanding, -1 if due is None else due[0])
        except Exception:  # noqa: BLE001 - an iterator of another make, a system whose queues cannot tell
            pass

    def got(self, iterator: Any, step: int, began_ns: int, took_ns: int) -> None:
        """Keep the wait for a batch, and what it took to fetch where the training thread does so itself."""
        if self._off or self._fetching:
            return
        try:
            over = iterator._dlprof_pass
            if over is None or not over.looked_at:
                over = self._look_at(iterator)
            used: tuple[int, ...] = _UNASKED
            if over.fetches:
                self._last_fetch_ns = took_ns
                over.asks = took_ns > _WORTH_ASKING_NS
                if self._before is not _UNASKED and self._counters is not None:
                    used = _used(self._before, self._counters.all())
                    self._before = _UNASKED
            self._batches.append((over, step, began_ns, took_ns, self._asked, self._collate_ns, used))
            self._collate_ns = 0
            if len(self._batches) >= _MOST_ROWS:
                self._tell_batches()
        except Exception as e:  # noqa: BLE001 - the script goes on
            self._fail(e)

    def _tell_batches(self) -> None:
        """Return each batch its rows."""
        recorder = dlprof._recorder
        batches, self._batches = self._batches, []  # at once: a signal's handler may get here too
        unix, loading, fetched, pid = recorder.unix(0), self._loading.rows, self._fetches.rows, os.getpid()
        for over, step, began, took, asked, collate, used in batches:
            kind, at = "batch", began + unix
            if not over.told:
                over.told, kind = True, "first"
                over.place = next((n for n, s in enumerate(recorder.loaders) if s is over.loader), -1)
                iterated = (over.began_ns + unix, step, -1, over.workers, 1, over.took_ns)
                loading.append(("start", over.place, *iterated, -1, -1, -1, -1, -1, -1))
            ready, outstanding, worker = _NOBODY if over.fetches else asked
            empty = -1 if ready < 0 else 0 if ready else 1
            loading.append((kind, over.place, at, step, worker, "", 1, took, empty, ready, outstanding, -1, -1, -1))
            if over.fetches:
                fetched.append((-1, pid, at, 1, took, collate, *used))
        self._loading.fit()
        self._fetches.fit()

    def _ended(self, iterator: Any, began: int, took: int) -> None:
        recorder, over = self._recorder, iterator._dlprof_pass
        if self._off or recorder is None or over is None or not over.looked_at:
            return
        try:
            self._tell_batches()
            begin, step = recorder.unix(began), recorder.row.number
            self._loading.rows.append(("end", over.place, begin, step, -1, "", 1, took, -1, -1, -1, -1, -1, -1))
        except Exception as e:  # noqa: BLE001 - the script goes on
            self._fail(e)

    # -- the workers

    def _watch_fetchers(self) -> None:
        """Watch whoever fetches, as workers do in loops that are other libraries' too."""
        from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher

        for fetcher in (_IterableDatasetFetcher, _MapDatasetFetcher):
            self._unwatched.setdefault(fetcher, fetcher.fetch)
            setattr(fetcher, "fetch", self._timed(self._unwatched[fetcher]))  # noqa: B010 - mypy knows no variable

    def _unwatch_fetchers(self) -> None:
        for fetcher, original in self._unwatched.items():
            if getattr(fetcher.fetch, "__wrapped__", None) is original:  # else somebody wrapped ours: it stays
                fetcher.fetch = original

    def _timed(self, original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        @functools.wraps(original)
        def fetch(fetcher: Any, index: Any) -> Any:
            began = 0 if self._fetching or self._recorder is not None else self._begin_fetch(fetcher)
            if not began:
                return original(fetcher, index)
            self._fetching = True
            try:
                data = original(fetcher, index)
            finally:
                self._fetching = False
            self._end_fetch(began)
            return data

        return fetch

    def _timed_collate(self, original: Any) -> Any:
        def timed(samples: Any) -> Any:
            began = perf_counter_ns()
            try:
                return original(samples)
            finally:
                self._collate_ns += perf_counter_ns() - began

        timed.is_timed = True  # type: ignore[attr-defined]
        return timed

    def _begin_fetch(self, fetcher: Any) -> int:
        """Return the time; 0: not ours to time."""
        try:
            if self._off:
                return 0
            if self._counters is None or not self._counters.worker:
                info = _worker_info()
                if info is None:
                    return 0
                self._counters = self._join(info)
            if not hasattr(fetcher.collate_fn, "is_timed"):
                fetcher.collate_fn = self._timed_collate(fetcher.collate_fn)
            self._collate_ns = 0
            return perf_counter_ns()
        except Exception as e:  # noqa: BLE001 - the script goes on
            self._fail(e)
            return 0

    def _end_fetch(self, began: int) -> None:
        try:
            now = perf_counter_ns()
            recorder, counters = dlprof._recorder, self._counters
            if counters is None:
                return
            # From the end of one fetch to the end of the next: a batch is shipped while the next is fetched.
            before, counters.last = counters.last, counters.all()
            used = _used(before, counters.last)
            start = recorder.unix(began)
            self._fetches.rows.append((counters.id, counters.pid, start, 1, now - began, self._collate_ns, *used))
            if len(self._fetches.rows) >= _MOST_ROWS:
                self._fetches.fit()
            if now - self._fetches.written_ns > WRITE_EVERY_NS:
                self._ship(now)
        except Exception as e:  # noqa: BLE001 - the script goes on
            self._fail(e)

    def _join(self, info: Any) -> _Counters:
        """Become a worker: its lines are written as it goes and when it ends, which it does without atexit."""
        from multiprocessing.util import Finalize

        Finalize(None, self._leave, exitpriority=10)
        return _Counters(info.id, worker=True)

    def _ship(self, now: int, *, last: bool = False) -> None:
        if not self._fetches.is_open:
            run = dlprof._recorder.run
            folder = folder_of_rank(run)
            if folder is None:
                self._fetches.written_ns = now
                return
            self._fetches.open(folder, age_of_rank(run))
        self._fetches.write(now, last=last)

    def _leave(self) -> None:
        try:
            self._ship(perf_counter_ns(), last=True)
        except Exception as e:  # noqa: BLE001 - the worker ends as it would without us
            self._fail(e)


class _Counters:
    """What the kernel says that this process has used: of the cores, and of storage.

    CPU time is the whole process's: data sets decode in threads of their own, and a worker ships its batches in one.
    While the training thread fetches it is that thread's: OpenMP's others spin on for a while after each operator.
    What it waited for a core is known of the thread that made this, which is the one that fetches or trains.
    """

    def __init__(self, worker_id: int = -1, *, worker: bool = False) -> None:
        self.id = worker_id
        self.pid = os.getpid()
        self.worker = worker
        self._schedstat = _Answer("/proc/thread-self/schedstat")
        self._io = _Answer("/proc/self/io")
        self.last = self.all()

    def cores(self) -> tuple[int, int, int]:
        """Return the ns of CPU time, those that the thread was ready and had no core, and its own (−1: unknown)."""
        words = self._schedstat.words()
        ran, delayed = (int(words[0]), int(words[1])) if words else (-1, -1)
        return time.process_time_ns(), delayed, ran

    def all(self) -> tuple[int, int, int, int]:
        """Return the first two, the bytes that came from storage, and those that were read at all (−1: unknown)."""
        words = self._io.words()
        stored, read = (int(words[9]), int(words[1])) if words else (-1, -1)
        used, delayed, _ = self.cores()
        return used if self.worker else time.thread_time_ns(), delayed, stored, read


def _worker_info() -> Any:
    """Return what PyTorch tells a loader's worker of itself; None: this is none."""
    return sys.modules["torch.utils.data._utils.worker"].get_worker_info()


def _used(before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
    """Return what was used between two answers of _Counters (−1: unknown)."""
    return tuple(-1 if b < 0 else a - b for a, b in zip(after, before, strict=True))


class _Answer:
    """A file of the kernel's that is read again and again; empty where it cannot be, or the script has closed it."""

    def __init__(self, path: str) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1
        self._file = file_of(self._fd)

    def words(self) -> list[bytes]:
        """Return what it says now."""
        if self._file is None or file_of(self._fd) != self._file:
            return []
        try:
            return os.pread(self._fd, 512, 0).split()
        except OSError:  # of a thread that is no more
            return []


class _Log:
    """Rows on their way into a file that several processes append to, each whole lines at a time.

    Of a row, the first `keys` cells tell apart what may be summed, and those from `sums` on are what is; in between are
    the first row's. The file grows no faster than its budget: rows that would exceed it are summed.
    """

    def __init__(self, name: str, line: Callable[[_Row], str], keys: int, sums: int) -> None:
        self._name = name
        self._line = line
        self._keys = keys
        self._sums = sums
        self.rows: list[_Row] = []
        self._file: Log | None = None
        self._begun_ns = 0
        self.written_ns = 0

    @property
    def is_open(self) -> bool:
        """Return whether there is a file."""
        return self._file is not None

    def open(self, folder: Path, age_ns: int = 0) -> None:
        """Open the file, or make it; its rank has trained for so long, in which others may have filled it."""
        self._file = Log(folder / self._name)
        self._begun_ns = perf_counter_ns() - age_ns

    def fit(self) -> None:
        """Sum what has gathered, if there is no file yet; rows are added without asking, as each takes its time."""
        if not self.is_open:
            self._sum()

    def write(self, now: int, *, last: bool) -> None:
        """Write what has gathered, as far as the budget allows; the last time in any case."""
        self.written_ns = now
        if not self.rows or self._file is None:
            return
        if self._file.size >= _BURST_BYTES + _BYTES_A_SECOND * (now - self._begun_ns) // 1_000_000_000:
            self._sum()
            if not last:
                return
        lines = "".join(map(self._line, self.rows))
        self.rows.clear()
        self._file.write(lines)

    def forget(self) -> None:
        """Drop rows and file: they are another process's."""
        self.rows.clear()
        self._file = None

    def _sum(self) -> None:
        keys, sums = self._keys, self._sums
        alike: dict[_Row, list[_Row]] = {}
        for row in self.rows:
            alike.setdefault(row[:keys], []).append(row)
        self.rows = []
        for rows in alike.values():
            columns = list(zip(*rows, strict=True))[sums:]
            self.rows.append((*rows[0][:sums], *(-1 if min(c) < 0 else sum(c) for c in columns)))


# In %-format, which takes half the time that f-strings take.
_BATCH = '{"kind":"%s","loader":%s,"start_ns":%s,"step":%s,"count":%s,"dur_ns":%s'
_QUEUE = ',"worker":%s,"empty":%s,"ready":%s,"outstanding":%s'
_FETCH = (
    '{"worker":%s,"pid":%s,"start_ns":%s,"count":%s,"dur_ns":%s,"collate_ns":%s,"cpu_ns":%s,"delay_ns":%s,'
    '"stored_bytes":%s,"read_bytes":%s}\n'
)


def _loading_line(row: _Row) -> str:
    kind, loader, start, step, worker, pids, count, dur, empty, ready, outstanding, cpu, delay, ran = row
    line = _BATCH % (kind, loader, start, step, count, dur)
    if ready >= 0:
        line += _QUEUE % (worker if count == 1 else -1, empty, ready, outstanding)
    if kind == "start":
        line += f',"workers":"{pids}"'
    elif kind == "usage":
        line += f',"cpu_ns":{cpu},"delay_ns":{delay},"thread_ns":{ran}'
    return line + "}\n"


def _fetch_line(row: _Row) -> str:
    return _FETCH % row
