"""Records how batches reach the training thread: its waits for loaders, and the work of each worker for a batch.

The rank writes the log `loading`: the wait for every batch, the cost of the fetch if the training thread fetches
itself, starts and ends of epochs, and the CPU time of the process. Workers write fetches.jsonl, with rows of the same
table. A worker starts before its rank knows its folder, so it keeps its lines until the rank has announced the folder.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any

from dlprof import marks
from dlprof.plain import words_of
from dlprof.record import guarded
from dlprof.record.attribution import passing
from dlprof.record.device.cpu import KernelCounters, used_between
from dlprof.record.hooks import Patch, at_uninstall, hidden, put, watch_method
from dlprof.record.loaders import UNSEEN, UNWATCHED, BatchSize, Digest, Pass, SampleDigests, adopt, worker_info
from dlprof.record.log import WRITE_EVERY_NS, BudgetLog, Log, Row
from dlprof.record.ranks import age_of_rank, folder_of_rank
from dlprof.record.recorder import Recorder
from dlprof.record.step_clock import Step

# Rows kept in memory while there is no file yet: enough for most validations before training.
_MOST_ROWS = 4_096

# If the training thread fetches itself, the kernel's counters are read only if a fetch takes at least this long.
_WORTH_READING_NS = 2_000_000

# Batches ready, batches in preparation and the worker that is next: unknown.
_UNKNOWN = (-1, -1, -1)

# CPU times of the process and of its pinning thread, and the cost of a fetch: not applicable to this row.
_UNUSED = (-1, -1, -1, -1)
_UNFETCHED = (-1, -1, -1, -1, -1, *UNWATCHED)

# The tensors of a batch, their bytes, and what sending them copies, if it was not looked at.
_UNSIZED = (*UNSEEN, -1)

# The kernel's counters of a fetch, if they were not read.
_UNREAD = (-1, -1, -1, -1)

# Raised by unknown kinds of iterators, and on systems whose queues do not know their size.
_UNLIKE_OURS = (AttributeError, LookupError, NotImplementedError, OSError, TypeError, ValueError)


class Loader:
    """Writes the log `loading`, with the units of the table `loading`."""

    name = "loader"

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._loading = BudgetLog(_loading_line, keys=2, sums=6)
        self._counters: KernelCounters | None = None
        self._pins: KernelCounters | None = None  # of the pinning thread of the newest loader pass
        self._usage = (0, 0, 0, 0, -1)  # when usage was last written; CPU times of this process and of that thread
        # Batches without rows yet. Rows are made later: while a batch arrives, our code is not in the CPU's caches.
        self._batches: list[tuple[Pass, int, int, int, tuple[int, int, int], tuple[int, ...]]] = []
        self._queue = _UNKNOWN  # the state of the iterator's queue at the last request for a batch
        self._before = _UNREAD  # the training thread's counters when it began to fetch
        self._last_fetch_ns = 0
        # Now, when torch was just imported: each worker's interpreter gets here too, or is a copy of one that did.
        self._wrap_ends()
        self._fetches = Fetches()
        os.register_at_fork(after_in_child=self._forked)
        at_uninstall(self._fetches.stop)  # if nothing has trained, stop() is never called

    def start(self, recorder: Recorder) -> None:
        """Begin the log; the recorder passes on the batches that this process fetches itself."""
        self._recorder = recorder
        self._loading.open(recorder.log("loading"))
        self._fetches.start()
        self._counters = self._counters or KernelCounters(whole_process=False)
        self._usage = (perf_counter_ns(), *self._counters.cores(), -1)

    def step(self, done: Sequence[Step]) -> None:
        """Write the rows collected so far."""
        now = done[-1].end_ns
        if now - self._usage[0] >= WRITE_EVERY_NS:
            self._write(now)

    def stop(self) -> None:
        """Write the rest."""
        try:
            self._write(perf_counter_ns(), last=True)
        finally:
            self._recorder = None
            self._fetches.stop()
            self._loading.forget()
            for counters in filter(None, (self._counters, self._pins)):
                counters.close()

    @guarded
    def begun(self, iterator: Any) -> None:
        """Find out who fetches in this pass, before its first batch is fetched."""
        if not self._fetches.off and not self._fetches.busy:
            self._look_at(iterator)

    def ask(self, iterator: Any) -> None:
        """Note how many batches are ready, how many are in preparation, and which worker prepares the next one."""
        if self._fetches.busy:
            return
        self._queue = _UNKNOWN
        tasks = getattr(iterator, "_task_info", None)
        try:
            if tasks is None:
                if self._last_fetch_ns > _WORTH_READING_NS and self._counters is not None:
                    self._before = self._counters.all()
                return
            outstanding = iterator._tasks_outstanding
            due = tasks.get(iterator._rcvd_idx)
            # Batches that came before their turn are kept among the tasks.
            ready = iterator._data_queue.qsize() + len(tasks) - outstanding
            self._queue = (ready, outstanding, -1 if due is None else due[0])
        except _UNLIKE_OURS:
            pass

    def got(self, iterator: Any, step: int, began_ns: int, took_ns: int) -> None:
        """Keep the wait for a batch, and the cost of its fetch if the training thread fetched it."""
        fetches = self._fetches
        if fetches.off or fetches.busy:
            return
        try:
            over = iterator._dlprof_pass
            if over is None or not over.looked_at:
                over = self._look_at(iterator)
            used: tuple[int, ...] = _UNREAD
            if over.fetches:
                self._last_fetch_ns = took_ns
                over.asks = took_ns > _WORTH_READING_NS
                if self._before is not _UNREAD and self._counters is not None:
                    used = used_between(self._before, self._counters.all())
                    self._before = _UNREAD
            of_fetch = (fetches.collate_ns, *used, *fetches.size[:2], *fetches.digest)
            self._batches.append((over, step, began_ns, took_ns, self._queue, of_fetch))
            fetches.collate_ns, fetches.digest = 0, UNWATCHED
            if len(self._batches) >= _MOST_ROWS:
                self._add_batches()
        except Exception as e:  # noqa: BLE001 - the script goes on
            self.fail(e)

    def fail(self, error: Exception) -> None:
        """Switch off: fetches are no longer timed."""
        self._fetches.fail(error)

    def _look_at(self, iterator: Any) -> Pass:
        over = adopt(iterator)
        fetcher: Any = getattr(iterator, "_dataset_fetcher", None)
        over.fetches = fetcher is not None and worker_info() is None
        if over.fetches:
            self._counters = self._counters or KernelCounters(whole_process=False)
            fetcher.collate_fn = self._fetches.timed_collate(fetcher.collate_fn)
            fetcher.fetch = self._fetches.noted(fetcher)
            over.asks = self._last_fetch_ns > _WORTH_READING_NS
        if pins := getattr(getattr(iterator, "_pin_memory_thread", None), "native_id", None):
            if self._pins is not None:
                self._pins.close()
            self._pins, self._usage = KernelCounters(whole_process=False, thread=pins), (*self._usage[:4], -1)
        over.workers = " ".join(str(w.pid) for w in getattr(iterator, "_workers", ()))
        over.looked_at = True
        return over

    def _wrap_ends(self) -> None:
        from torch.utils.data import dataloader

        def timed(ending: Any) -> Any:
            @functools.wraps(ending)
            def _shutdown_workers(iterator: Any) -> Any:
                # Also called by __del__, possibly while the interpreter shuts down.
                if self._recorder is None or getattr(iterator, "_shutdown", True):
                    with passing:
                        return ending(iterator)
                began = perf_counter_ns()
                try:
                    with passing:
                        return ending(iterator)
                finally:
                    self._ended(iterator, began, perf_counter_ns() - began)

            return _shutdown_workers

        ours: Any = dataloader._MultiProcessingDataLoaderIter
        put(ours, "_shutdown_workers", timed(ours._shutdown_workers))
        watch_method(dataloader._BaseDataLoaderIter, "_shutdown_workers", timed)

    @guarded
    def _ended(self, iterator: Any, began: int, took: int) -> None:
        recorder, over = self._recorder, iterator._dlprof_pass
        if self._fetches.off or recorder is None or over is None or not over.looked_at:
            return
        self._add_batches()
        at = (recorder.unix(began), recorder.clock.row.number)
        self._loading.rows.append(("end", over.place, *at, -1, "", 1, took, *_UNKNOWN, *_UNUSED, *_UNFETCHED))

    def _add_batches(self) -> None:
        """Make rows for the batches that have none yet."""
        recorder = marks.recorder
        batches, self._batches = self._batches, []  # at once: a signal handler may get here too
        unix, loading = recorder.unix(0), self._loading.rows
        for over, step, began, took, queue, of_fetch in batches:
            kind, at = "batch", began + unix
            if not over.reported:
                over.reported, kind = True, "first"
                over.place = next((n for n, s in enumerate(recorder.observed.loaders) if s is over.loader), -1)
                at_iter = (over.began_ns + unix, step)
                began_with = ("start", over.place, *at_iter, -1, over.workers, 1, over.took_ns)
                loading.append((*began_with, *_UNKNOWN, *_UNUSED, *_UNFETCHED))
            ready, outstanding, worker = _UNKNOWN if over.fetches else queue
            empty = -1 if ready < 0 else 0 if ready else 1
            waited = (kind, over.place, at, step, worker, "", 1, took, empty, ready, outstanding)
            collate, cpu, delay, *read = of_fetch
            if over.fetches:
                loading.append((*waited, cpu, delay, -1, -1, collate, *read))
            else:
                loading.append((*waited, *_UNUSED, *_UNFETCHED))
        self._loading.fit()

    def _write(self, now: int, *, last: bool = False) -> None:
        recorder, counters = self._recorder, self._counters
        if recorder is None or counters is None or self._fetches.off:
            return
        began, *before = self._usage
        self._usage = (now, *counters.cores(), self._pins.cores()[2] if self._pins else -1)
        used = used_between(before, self._usage[1:])
        self._add_batches()
        at = (recorder.unix(began), recorder.clock.row.number)
        self._loading.rows.append(("usage", -1, *at, -1, "", 1, now - began, *_UNKNOWN, *used, *_UNFETCHED))
        self._loading.write(now, last=last)

    def _forked(self) -> None:
        """Reset in a forked child, which may be a worker."""
        self._recorder = None
        self._counters = self._pins = None
        self._batches.clear()
        self._loading.forget()
        self._fetches.forked()


class Fetches:
    """Times the fetch of each batch. In a loader's worker it wraps PyTorch's fetchers and writes fetches.jsonl."""

    def __init__(self) -> None:
        self.log = BudgetLog(_fetch_line, keys=2, sums=3)
        self.off = False
        self.busy = False  # this worker is fetching; loaders that its data set uses are not timed
        self.collate_ns = 0  # of the current batch
        self.size = _UNSIZED  # of the batch of this loader that was last measured
        self.digest: Digest = UNWATCHED  # of a sample of the current batch
        self._digests = SampleDigests()
        self._asked: tuple[Any, Any] = None, None  # the data set of the current batch, and the indices
        self._worker = -1  # the number of this worker
        self._counters: KernelCounters | None = None  # of this worker; below, their values after its last fetch
        self._last: tuple[int, int, int, int] = _UNREAD
        self._patches: list[Patch] = []
        self._wrap()

    def start(self) -> None:
        """Unwrap the fetchers: this process trains and is not a worker."""
        self._unwrap()

    def stop(self) -> None:
        """Time no fetch any more."""
        self._unwrap()
        self.off = True
        self.log.forget()

    def forked(self) -> None:
        """Reset in a forked child, which may be a worker."""
        self.log.forget()
        self.busy = False
        self.size, self.digest = _UNSIZED, UNWATCHED
        self._digests = SampleDigests()
        self._counters = None
        if not self.off:
            self._wrap()

    def fail(self, error: Exception) -> None:
        """Switch off. If a folder is gone or full, only the rank warns, not each worker."""
        recorder = marks.recorder
        if not self.off and recorder is not None and not (self._counters is not None and isinstance(error, OSError)):
            recorder.warn(f"{Loader.name} is off: {words_of(error)}; the job goes on without it")
        self.off = True

    def timed_collate(self, original: Any) -> Any:
        """Return a collate function that adds to collate_ns how long it takes."""
        sizes = BatchSize()

        def timed(samples: Any) -> Any:
            try:
                self.digest = self._digests.see(*self._asked, samples)  # before it is collated: that may change it
            except Exception as e:  # noqa: BLE001 - the script goes on
                self.fail(e)
            began = perf_counter_ns()
            try:
                with passing:
                    batch = original(samples)
            finally:
                self.collate_ns += perf_counter_ns() - began
            try:
                self.size = sizes.see(batch)
            except Exception as e:  # noqa: BLE001 - the script goes on
                self.fail(e)
            return batch

        timed.is_timed = True  # type: ignore[attr-defined]
        return hidden(timed)

    def noted(self, fetcher: Any) -> Any:
        """Return the `fetch` of a fetcher of the training thread that notes which samples a batch is of."""
        original = fetcher.fetch

        def fetch(index: Any) -> Any:
            self._asked = fetcher.dataset, index
            with passing:
                return original(index)

        return hidden(fetch)

    def _wrap(self) -> None:
        """Wrap PyTorch's fetchers, which the worker loops of other libraries call too."""
        from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher

        self._unwrap()
        fetchers: tuple[Any, ...] = (_IterableDatasetFetcher, _MapDatasetFetcher)
        self._patches = [put(fetcher, "fetch", self._timed(fetcher.fetch)) for fetcher in fetchers]

    def _unwrap(self) -> None:
        for patch in self._patches:
            patch.undo()
        self._patches = []

    def _timed(self, original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        @functools.wraps(original)
        def fetch(fetcher: Any, index: Any) -> Any:
            began = 0 if self.busy else self._begin(fetcher)
            if not began:
                with passing:
                    return original(fetcher, index)
            self.busy = True
            self._asked = fetcher.dataset, index
            try:
                with passing:
                    data = original(fetcher, index)
            finally:
                self.busy = False
            self._end(began)
            return data

        return fetch

    def _begin(self, fetcher: Any) -> int:
        """Return the time, or 0 if this fetch is not timed."""
        try:
            if self.off:
                return 0
            if self._counters is None:
                info = worker_info()
                if info is None:
                    return 0
                self._join(info.id)
            if not hasattr(fetcher.collate_fn, "is_timed"):
                fetcher.collate_fn = self.timed_collate(fetcher.collate_fn)
            self.collate_ns, self.digest = 0, UNWATCHED
            return perf_counter_ns()
        except Exception as e:  # noqa: BLE001 - the script goes on
            self.fail(e)
            return 0

    def _end(self, began: int) -> None:
        try:
            now = perf_counter_ns()
            if self._counters is None:
                return
            # From the end of one fetch to the end of the next: a batch is sent while the next one is fetched.
            before, self._last = self._last, self._counters.all()
            at, used = marks.recorder.unix(began), used_between(before, self._last)
            row = (self._worker, os.getpid(), at, 1, now - began, self.collate_ns, *used, *self.size, *self.digest)
            self.log.rows.append(row)
            if len(self.log.rows) >= _MOST_ROWS:
                self.log.fit()
            if now - self.log.written_ns > WRITE_EVERY_NS:
                self._send(now)
        except Exception as e:  # noqa: BLE001 - the script goes on
            self.fail(e)

    def _join(self, worker: int) -> None:
        """Set up recording in a worker: lines are written from time to time and at its end, which skips atexit."""
        from multiprocessing.util import Finalize

        Finalize(None, self._leave, exitpriority=10)
        self._worker = worker
        self._counters = KernelCounters(whole_process=True)
        self._last = self._counters.all()

    def _send(self, now: int, *, last: bool = False) -> None:
        run = marks.recorder.run
        if not self.log.is_open:
            folder = folder_of_rank(run)
            if folder is None:
                self.log.written_ns = now
                return
            self.log.open(Log(folder / "fetches.jsonl"), age_of_rank(run))
        self.log.write(now, last=last)

    @guarded
    def _leave(self) -> None:
        self._send(perf_counter_ns(), last=True)


# In %-format, which takes half the time that f-strings take.
_FETCHED = ',"collate_ns":%s,"cpu_ns":%s,"delay_ns":%s,"stored_bytes":%s,"read_bytes":%s,"tensors":%s,"tensor_bytes":%s'
_BATCH = '{"kind":"%s","loader":%s,"start_ns":%s,"step":%s,"count":%s,"dur_ns":%s'
_QUEUE = ',"worker":%s,"empty":%s,"ready":%s,"outstanding":%s'
_FETCH = (
    '{"worker":%s,"pid":%s,"start_ns":%s,"count":%s,"dur_ns":%s,"collate_ns":%s,"cpu_ns":%s,"delay_ns":%s,'
    '"stored_bytes":%s,"read_bytes":%s,"tensors":%s,"tensor_bytes":%s,"copied_bytes":%s'
)
_SAMPLE = ',"sample":%s,"of_samples":%s,"digest":%s,"sample_bytes":%s'


def _fetch_line(row: Row) -> str:
    return f"{_FETCH % row[:13]}{_sample(row[3], row[13:])}}}\n"


def _sample(count: Any, digest: Row) -> str:
    """Return what is said of a watched sample; "": there is none, or the row is a sum."""
    return _SAMPLE % digest if count == 1 and digest[0] >= 0 else ""


def _loading_line(row: Row) -> str:
    kind, loader, start, step, worker, pids, count, dur, empty, ready, outstanding, cpu, delay, ran, pin = row[:15]
    line = _BATCH % (kind, loader, start, step, count, dur)
    if ready >= 0:
        line += _QUEUE % (worker if count == 1 else -1, empty, ready, outstanding)
    if kind == "start":
        line += f',"workers":"{pids}"'
    elif kind == "usage":
        line += f',"cpu_ns":{cpu},"delay_ns":{delay},"thread_ns":{ran},"pin_ns":{max(pin, -1)}'
    elif row[15] >= 0:
        line += _FETCHED % (row[15], cpu, delay, *row[16:20]) + _sample(count, row[20:])
    return line + "}\n"
