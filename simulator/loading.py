"""PyTorch's DataLoader: workers fetch ahead, in order, as far as their queue goes (torch/utils/data/dataloader.py).

Batch k is the (k mod n)-th worker's. Whenever the training thread takes a batch the next one is asked for, so that
workers × prefetch_factor are under way, and batches are handed over in order. With pin_memory=True one thread copies
them into pinned memory between, one after the other, as they come from the workers (_utils/pin_memory.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Loader:
    """One loader. Times in ns of one batch: `fetch` to read and collate it, of which `cpu` on a core."""

    workers: int = 4
    prefetch: int = 2
    fetch: int = 8_000_000
    cpu: int = 6_000_000
    collate: int = 800_000
    slow_worker: int = 0  # worker 0 takes so much longer
    jitter: float = 0.15  # standard deviation of the logarithm of `fetch`
    persistent: bool = True
    start: int = 90_000_000  # until a new worker fetches
    stop: int = 10_000_000  # until workers have left
    receive: int = 150_000  # that next() takes for a batch that is there
    pin: int = 0  # that the pinning thread takes for a batch; 0: nothing is pinned, or workers fill pinned memory


@dataclass(slots=True)
class Fetched:
    """One batch as it was fetched, ns on the true clock; worker −1 is the training thread."""

    worker: int
    pid: int
    start: int
    end: int
    cpu: int


@dataclass(slots=True)
class Waited:
    """What the training thread spent in a loader, ns on the true clock, and what the queue said when asked.

    kind: start (iter()), first, batch, end. −1: there is no queue.
    """

    kind: str
    step: int
    start: int
    end: int
    worker: int = -1
    ready: int = -1
    outstanding: int = -1
    pids: tuple[int, ...] = ()


class Queue:
    """A loader as one rank iterates over it."""

    def __init__(self, loader: Loader, factors: Sequence[float], pid: int) -> None:
        self.loader = loader
        self.fetched: list[Fetched] = []
        self.waited: list[Waited] = []
        self._factors = factors  # of what each batch takes to fetch
        self._pid = pid  # of the training process; those of its workers follow
        self._workers: list[int] = []  # process ids
        self._free: list[int] = []  # when each worker is done with what it was given
        self.pinned: list[tuple[int, int]] = []  # when the pinning thread began a batch and was done with it
        self._ready: list[int] = []  # when each batch of this epoch is; −1: it waits for the pinning thread
        self._arrived: list[tuple[int, int]] = []  # of these, a heap: when it came from its worker, its number
        self._pins_from = 0  # when the pinning thread is done with what it has
        self._stored: set[int] = set()  # batches that came before the one whose turn it was
        self._taken = -1  # of this epoch; −1: none has begun
        self._total = 0  # of all epochs

    def next(self, now: int, step: int) -> int:
        """Take a batch; return when the training thread has it. The first one begins an epoch."""
        if self._taken < 0:
            now = self._begin(now, step)
        loader, kind = self.loader, "batch" if self._taken else "first"
        if not loader.workers:
            end = now + self._takes(self._total) + loader.pin
            self.fetched.append(Fetched(-1, self._pid, now, end, self._cpu(end - now)))
            self.waited.append(Waited(kind, step, now, end))
        else:
            self._pin(now, self._taken)
            ready = sum(0 <= at <= now for at in self._ready[self._taken :])
            # Of those that workers were asked for, the ones that were not yet taken off the queue, ready or not.
            waiting = len(self._ready) - self._taken - len(self._stored)
            due = self._ready[self._taken]
            if self._taken not in self._stored:
                self._stored |= {n for n in range(self._taken + 1, len(self._ready)) if 0 <= self._ready[n] < due}
            self._stored.discard(self._taken)
            end = max(now, due) + loader.receive
            self.waited.append(Waited(kind, step, now, end, self._taken % loader.workers, ready, waiting))
            self._send(end)
        self._taken += 1
        self._total += 1
        return end

    def finish(self, now: int, step: int) -> int:
        """End an epoch; return when that is done."""
        leave = self.loader.workers and not self.loader.persistent
        end = now + (self.loader.stop if leave else 0)
        self.waited.append(Waited("end", step, now, end))
        self._taken = -1
        if leave:
            self._workers = []
        return end

    def _begin(self, now: int, step: int) -> int:
        loader = self.loader
        self._taken, self._ready, self._arrived, self._stored = 0, [], [], set()
        begun = now
        if loader.workers:
            up = now
            if not self._workers:
                self._workers = [self._pid + 1 + len(self.waited) + w for w in range(loader.workers)]
                begun = now + 500_000 * loader.workers  # fork() of each
                up = begun + loader.start
            self._free = [up] * loader.workers
            for _ in range(loader.workers * loader.prefetch):
                self._send(up)
        self.waited.append(Waited("start", step, now, begun, pids=tuple(self._workers)))
        return begun

    def _send(self, now: int) -> None:
        """Return the worker whose turn it is its next batch."""
        number = len(self._ready)
        worker = number % self.loader.workers
        begin = max(now, self._free[worker])
        took = self._takes(self._total + number - self._taken)
        end = begin + took + (self.loader.slow_worker if worker == 0 else 0)
        self._free[worker] = end
        self._ready.append(-1 if self.loader.pin else end)
        if self.loader.pin:
            heapq.heappush(self._arrived, (end, number))
        self.fetched.append(Fetched(worker, self._workers[worker], begin, end, self._cpu(end - begin)))

    def _pin(self, now: int, due: int) -> None:
        """Let the pinning thread copy what comes until now, and on until the batch that is due is there.

        Nothing is asked of the workers meanwhile, so that what they have under way is all that can come.
        """
        while self._arrived and (self._arrived[0][0] <= now or self._ready[due] < 0):
            came, number = heapq.heappop(self._arrived)
            begin = max(came, self._pins_from)
            self._pins_from = self._ready[number] = begin + self.loader.pin
            self.pinned.append((begin, self._pins_from))

    def _takes(self, batch: int) -> int:
        return round(self.loader.fetch * self._factors[batch % len(self._factors)])

    def _cpu(self, took: int) -> int:
        return round(took * self.loader.cpu / max(self.loader.fetch, 1))
