"""What the step would be with another number of loader workers: the run's own batches, replayed.

A worker fetches its batches one after the other, batch k is worker k mod n's, and the training loop takes them in order
(torch.utils.data; the depth of the queue is n × prefetch_factor). So batch k is there at

    there(k) = max(there(k − n), taken(k − n · prefetch)) + fetch(k)        its worker is free, and was asked for it
    pinned(k) = max(there(k), pinned(k − 1)) + pin                          one thread pins all, with `pin_memory=True`
    taken(k) = max(pinned(k), taken(k − 1) + own(k − 1))                    in order, when the loop asks

with the recorded times of fetching and of the loop's own work between batches. A step that takes m batches, as where
gradients are accumulated, is m of these. Where it takes one of each of L loaders, these are one loader of L times as
many workers: batch k is loader k mod L's, and that one's worker (k ÷ L) mod n makes it. The rate is then n ÷ fetch, as
DS-Analyzer has it (Mohan et al., Analyzing and Mitigating Data Stalls in DNN Training, VLDB 2021), up to the loop's.

Cores set the other limit. What a fetch waits for storage is the same however many wait; what it computes takes longer
once more threads are ready to run than there are cores, and so does the loop's own work. A thread that finds N ready on
C cores runs at min(1, C ÷ N), as under a fair scheduler. Ranks train at the same time, for they wait for each other;
which of them, and of the workers, are ready then is taken from how long each is busy, independently of the others. That
gives the mean stretch of a thread's computing; times and stretches are solved for together. Where an operator is split
over several threads, it ends with the last of them: one that has no core holds up all, which spin meanwhile and count
as computing, so that k threads progress with the k-th power of what one does. (With more threads than cores they do not
spin: OpenMP's then give up their core to each other.) The kernel measures how long computing really waited for a core:
by how much that differs from the model's stretch of the run as it was, for other jobs on the host or for a scheduler
that does better, is taken to stay; without workers, as far as they cannot have been it. But no thread is held up for
longer than others compute: while a loop that needs k cores stands still, C − k + 1 of them at least run something else.
Where threads wait for each other, what a worker computes may hold them up for longer: see BARRIER in handover.py.

A batch that a worker makes has to be handed over, which the loop, and the worker, compute beside. A loop that has no
workers pays nothing of that, and has its cores for itself while it does not fetch.

What it costs to hand a batch from a worker to the training thread, which a loop that fetches itself does not pay.

A worker puts each tensor into shared memory of its own, whose pages the kernel makes empty first, and passes a file
descriptor for it through a socket: one connection, with both ends' authentication, a tensor (torch.multiprocessing's
reductions, the strategy file_descriptor). So both sides pay by the tensor, and by the byte: the worker copies, and the
training thread's first touch of each page is a fault. Workers compute beside training, and what they compute costs
that more than their own time where its operators are split over all cores.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]

_BATCHES = 600
_ROUNDS = 12

# Making a batch: reading, decoding and changing its samples, putting them together, and copying it to pinned memory.
SAMPLES, COLLATING, PINNING = "samples", "collating", "pinning"

_NOTHING: Times = np.zeros(1)

# The share of a loop's own work that stays at least where it takes no batches over.
_LEFT = 0.1


@dataclass(frozen=True)
class Handover:
    """What a batch costs beside its fetch where a worker makes it, ns of computing."""

    taking_ns: float = 0.0  # of the training thread
    sending_ns: float = 0.0  # of the worker

    def times(self, factor: float) -> Handover:
        """Return the same on a host that takes so many times as long."""
        return Handover(self.taking_ns * factor, self.sending_ns * factor)


@dataclass(frozen=True)
class Told:
    """What is known of a batch's handover: the usual, and between which it is."""

    usual: Handover = Handover()
    least: Handover = Handover()
    most: Handover = Handover()


# Of a batch whose handover costs nothing, as far as anybody waits for it.
UNTOLD = Told()


@dataclass(frozen=True)
class Pace:
    """One rank's input as it was recorded. Times in ns, without what was waited for a core."""

    workers: int
    prefetch: int
    own: Times  # of the loop between two batches
    own_cpu: float  # share of it that computes, in each of `threads`
    threads: int
    fetch: Times  # of a batch
    fetch_cpu: Times  # of it, computing
    cores: float  # of the host, and
    ranks: int  # how many ranks like this one share them
    excess: tuple[float, float] = (1.0, 1.0)  # measured stretch ÷ the model's, of the loop and of a fetch
    excess_alone: float = np.nan  # of the loop without workers, by what theirs do not explain; NaN: as with them
    stretch: float = 1.0  # of the loop's computing, as measured
    others_cpu: float = np.nan  # of a batch of those other ranks; NaN: as this one's
    handover: Told = UNTOLD  # of a batch; with workers, `own` and `fetch_cpu` hold it
    gap: float = 0.0  # the part of `fetch` that passes between a worker's fetches
    barrier: float = 1.0  # what workers' computing costs a loop whose threads wait for each other, as a multiple of it
    batches: int = 1  # of a step
    loaders: int = 1  # that give these in turn, each with so many workers
    alone: float = 1.0  # the part of the loop's own time as recorded that is `own`: the rest, it had no core
    collate: Times = field(default_factory=lambda: _NOTHING)  # the part of `fetch` that is collating, and
    collate_cpu: Times = field(default_factory=lambda: _NOTHING)  # of `fetch_cpu`
    pin: float = 0.0  # what the thread that pins them takes for a batch; 0: there is none

    @property
    def batch_cpu(self) -> float:
        """What a batch computes in the mean over the ranks that share the cores."""
        mine = float(self.fetch_cpu.mean())
        return mine if np.isnan(self.others_cpu) else (mine + (self.ranks - 1) * self.others_cpu) / self.ranks

    @property
    def costly(self) -> str:
        """What takes longer of making a batch, by all who do it: SAMPLES, COLLATING or PINNING."""
        whole = float(self.fetch.mean())
        return PINNING if self.pin * self.workers > whole else COLLATING if 2 * self.collate.mean() > whole else SAMPLES

    def without(self, part: str) -> Pace:
        """Return the pace where a part of making batches, SAMPLES, COLLATING or PINNING, costs nothing."""
        if part == PINNING:
            return replace(self, pin=0.0)
        fetch, cpu = self.collate, self.collate_cpu
        if part == COLLATING:
            fetch, cpu = self.fetch - fetch, self.fetch_cpu - cpu
        if self.workers:  # a batch is handed over whatever it took to make
            cpu = np.maximum(cpu, np.minimum(self.handover.least.sending_ns, self.fetch_cpu))
        others = self.others_cpu * float(cpu.mean()) / max(float(self.fetch_cpu.mean()), 1.0)
        changed = replace(self, fetch=fetch, fetch_cpu=cpu, others_cpu=others)
        return replace(changed, collate=_NOTHING, collate_cpu=_NOTHING)

    def with_workers(self, workers: int) -> Pace:
        """Return the pace with so many workers: what handing batches over costs comes, or goes with the last worker."""
        if bool(workers) == bool(self.workers):
            return self
        cost = self.handover.usual if workers else self.handover.usual.times(-1)
        taking, sending, gap = cost.taking_ns, cost.sending_ns, 0.0 if workers else self.gap
        # What is told of the handover may be more than what was recorded of all.
        own, cpu = np.maximum(self.own + taking, _LEFT * self.own), np.maximum(self.fetch_cpu + sending, 0.0)
        fetch = np.maximum(self.fetch + max(sending, 0.0) - gap, cpu)
        return replace(self, own=own, fetch=fetch, fetch_cpu=cpu, others_cpu=max(self.others_cpu + sending, 0.0))

    @property
    def where_workers_cost_least(self) -> Pace:
        """The pace where workers cost as little as may be: training waited for a core no longer than was measured."""
        own = self.own * self.alone ** (1 / self.together - 1)
        return self._with(self.handover.least, LEAST_BARRIER, own)

    @property
    def where_workers_cost_most(self) -> Pace:
        """The pace where workers cost as much as may be."""
        return self._with(self.handover.most, MOST_BARRIER, self.own)

    def _with(self, handover: Handover, barrier: float, own: Times) -> Pace:
        known = replace(self.handover, usual=handover)
        return replace(self, handover=known, barrier=barrier if self.barrier > 1 else 1.0, own=own)

    @property
    def together(self) -> int:
        """How many threads of the loop must all have a core for it to progress."""
        return self.threads if self.threads <= self.cores else 1


@dataclass(frozen=True)
class Forecast:
    """The mean step of one rank with so many workers, ns, and the part of it in which the loop waits for data."""

    workers: int
    step_ns: float
    wait_ns: float


def replayed(pace: Pace, workers: int) -> Forecast:
    """Return the mean step with so many workers as the model has it; 0: the loop fetches itself."""
    pace = pace.with_workers(workers)
    trained, fetched = float(pace.own.mean()) * pace.own_cpu, pace.batch_cpu
    others = (pace.ranks - (workers == 0)) * fetched + (pace.ranks - 1) * pace.threads * trained
    longest = max(
        1.0 + held_up(pace) * others / max(pace.cores - pace.threads + 1, 1.0) / max(trained, 1.0), pace.stretch
    )
    excess = pace.excess[0] if workers or np.isnan(pace.excess_alone) else pace.excess_alone
    trains, fetches, forecast, pin = 1.0, 1.0, Forecast(workers, 0.0, 0.0), pace.pin / pace.loaders
    for _ in range(_ROUNDS):
        own, fetch = pace.own * (1 - pace.own_cpu + pace.own_cpu * trains), pace.fetch + pace.fetch_cpu * (fetches - 1)
        forecast, overlap = replay(own, fetch, pace.fetch_cpu, workers * pace.loaders, pace.prefetch, pin)
        step = forecast.step_ns
        busy, loop = (trained * trains / step, fetched * fetches / step), 1 - forecast.wait_ns / step
        now = stretches(pace, workers * pace.loaders, busy, loop, overlap)
        # Half-way, or the two would swing around each other.
        trains = (trains + min(max(1.0, now[0] * excess), longest)) / 2
        fetches = (fetches + max(1.0, now[1] * pace.excess[1])) / 2
    # The mean stretch may predict a little more than all cores at work can do.
    least = pace.ranks * (pace.threads * trained + fetched) / pace.cores
    step, wait = max(forecast.step_ns, least), forecast.wait_ns
    return Forecast(workers, step * pace.batches, wait * pace.batches)


def held_up(pace: Pace) -> float:
    """Return what others' computing costs the loop, as a multiple of it."""
    return pace.barrier if pace.together > 1 else 1.0


def replay(own: Times, fetch: Times, cpu: Times, workers: int, prefetch: int, pin: float = 0) -> tuple[Forecast, float]:
    """Return the mean step of one batch, and the share of what fetches compute (`cpu`) that falls into the loop's work.

    `workers`: of all loaders that give batches in turn; `pin`: what pinning takes for a batch, ÷ so many loaders.
    """
    if not workers:
        wait = float(fetch.mean())
        return Forecast(0, float(own.mean()) + wait, wait), 0.0
    depth = workers * max(prefetch, 1)
    # The first two fillings of the queue are no steady state.
    skip = 2 * depth
    n = max(_BATCHES, 2 * skip)
    own, fetch, cpu = (_stretch_of(times, n) for times in (own, fetch, cpu))
    owns, takes = own.tolist(), fetch.tolist()
    there, taken = [0.0] * n, [0.0] * n
    requested = begun = waited = pinned = 0.0
    for k in range(n):
        free = there[k - workers] if k >= workers else 0.0
        ordered = taken[k - depth] if k >= depth else 0.0
        there[k] = max(free, ordered) + takes[k]
        pinned = max(there[k], pinned) + pin
        taken[k] = max(pinned, requested)
        if k == skip:
            begun, waited = requested, 0.0
        waited += taken[k] - requested
        requested = taken[k] + owns[k]
    mean = Forecast(workers, (requested - begun) / (n - skip), waited / (n - skip))
    return mean, _overlap(np.array(taken), own, np.array(there), fetch, cpu)


def _stretch_of(times: Times, n: int) -> Times:
    """Return n times in a row, repeated where there are fewer, with the mean of all."""
    chosen = np.resize(times, n)
    scaled: Times = chosen * (times.mean() / max(chosen.mean(), 1e-9))
    return scaled


def _overlap(begin: Times, own: Times, there: Times, fetch: Times, cpu: Times) -> float:
    """Return the share of what fetches compute that falls into the loop's own work; each computes evenly throughout."""
    # What the loop has worked until any time, from where its batches begin and end.
    times, worked = np.column_stack((begin, begin + own)).ravel(), np.cumsum(own)
    until = np.column_stack((worked - own, worked)).ravel()
    inside = np.interp(there, times, until) - np.interp(there - fetch, times, until)
    total = float(cpu.sum())
    return float((cpu * inside / np.maximum(fetch, 1e-9)).sum()) / total if total else 0.0


def stretches(pace: Pace, workers: int, busy: tuple[float, float], loop: float, overlap: float) -> tuple[float, float]:
    """Return how much longer computing takes the loop, and a worker, than with a core for every thread.

    `busy`: the share of the time that a rank's loop, and its workers together, are ready to compute; `loop`: that the
    loop does not wait for data, on all ranks at once; `overlap`: the share of what workers compute that is then.
    """
    trains, fetches = busy
    computes, others = trains / max(loop, 1e-9), pace.ranks - 1

    def speed(itself: int, loops: int, fetchers: int, each: float, at_once: int = 1) -> float:
        ready = itself + pace.threads * np.arange(loops + 1)[:, None] + np.arange(fetchers + 1)[None, :]
        chance = _chance(loops, computes)[:, None] * _chance(fetchers, each)[None, :]
        return float((chance * np.minimum(1.0, pace.cores / ready) ** at_once).sum())

    def longer(progress: float) -> float:
        return 1.0 + held_up(pace) * (1.0 / progress - 1.0)

    if not workers:
        waiting = speed(1, 0, others, fetches / max(1.0 - loop, 1e-9))
        return longer(speed(pace.threads, others, 0, 0.0, pace.together)), 1.0 / waiting
    fetchers, each = pace.ranks * workers, fetches / workers
    then, otherwise = each * overlap / max(loop, 1e-9), each * (1 - overlap) / max(1 - loop, 1e-9)
    training, waiting = speed(1, pace.ranks, fetchers - 1, then), speed(1, 0, fetchers - 1, otherwise)
    fetching = overlap * training + (1.0 - overlap) * waiting
    return longer(speed(pace.threads, others, fetchers, then, pace.together)), 1.0 / fetching


def _chance(n: int, share: float) -> Times:
    """Return the binomial distribution: how likely each number of n is ready, each for such a share of the time."""
    share = min(max(share, 1e-9), 1 - 1e-9)
    k = np.arange(n + 1, dtype=float)
    factorial = np.concatenate(([0.0], np.cumsum(np.log(k[1:]))))
    logs: Times = factorial[n] - factorial - factorial[::-1] + k * np.log(share) + (n - k) * np.log1p(-share)
    return np.exp(logs)


_MS, _MB = 1e6, 1e6


# CPU time of the training thread and of the worker: of a batch, of each of its tensors, and of each megabyte. Measured
# with batches of 1 to 40 tensors of 1 kB to 4 MB, torch 2.13 on two cores of an AMD EPYC.
_TAKING = (0.2 * _MS, 0.15 * _MS, 0.3 * _MS)


_SENDING = (0.2 * _MS, 0.16 * _MS, 0.9 * _MS)


# A host may be so many times faster or slower than that one.
HOSTS_DIFFER = 2.0


# Tensors of a batch where they were not counted: features and targets, and at the worst a recommender's tables.
_USUAL, _MANY = 2, 32


# What a millisecond of a worker's computing costs an operator that is split over all cores: more than one, for all its
# threads wait at its end for the one that lost its core, and caches are cold after. 1.3 for convolutions of tens of
# milliseconds (workloads/ddp_resnet.py, two threads on two cores), 1.6 for those of one (pytorch/examples mnist).
BARRIER = 1.4


LEAST_BARRIER, MOST_BARRIER = 1.0, 2.0


def handover(tensors: float, size: float) -> Handover:
    """Return what a batch of so many tensors, which hold so many bytes, costs to hand over."""

    def cost(a_batch: float, a_tensor: float, a_megabyte: float) -> float:
        return a_batch + a_tensor * tensors + a_megabyte * size / _MB

    return Handover(cost(*_TAKING), cost(*_SENDING))


def told(tensors: float, size: float, taken_ns: float) -> Told:
    """Return what a batch of so many tensors costs; −1: they were not counted. `taken_ns`, where that was measured."""
    usual = handover(*((tensors, size) if tensors >= 0 else (_USUAL, 0.0)))
    least, most = usual.times(1 / HOSTS_DIFFER), usual.times(HOSTS_DIFFER)
    if tensors < 0:
        least, most = Handover(), handover(_MANY, 0.0).times(HOSTS_DIFFER)
    if taken_ns >= 0:
        usual, least, most = (Handover(taken_ns, one.sending_ns) for one in (usual, least, most))
    return Told(usual, least, most)
