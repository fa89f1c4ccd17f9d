"""What the step would be with another number of loader workers: the run's own batches, replayed.

A worker fetches its batches one after the other, batch k is worker k mod n's, and the training loop takes them in order
(torch.utils.data; the depth of the queue is n × prefetch_factor). So batch k is there at

    there(k) = max(there(k − n), taken(k − n · prefetch)) + fetch(k)        its worker is free, and has the request
    pinned(k) = max(there(k), pinned(k − 1)) + pin                          one thread pins all, with `pin_memory=True`
    taken(k) = max(pinned(k), taken(k − 1) + own(k − 1))                    in order, when the loop requests it

with the recorded times of fetching and of the loop's own work between batches. A step that takes m batches (gradient
accumulation) is m of these. If it takes one from each of L loaders, they act as one loader with L times as many
workers: batch k comes from loader k mod L, and from its worker (k ÷ L) mod n. The rate is then n ÷ fetch, as in
DS-Analyzer (Mohan et al., Analyzing and Mitigating Data Stalls in DNN Training, VLDB 2021), up to the loop's rate.

Cores set the other limit. A fetch waits for storage equally long however many fetches wait. Its computing takes longer
once more threads are ready to run than there are cores, and so does the loop's own work. A thread that finds N ready on
C cores runs at min(1, C ÷ N), as under a fair scheduler. Ranks train at the same time, as they wait for each other. The
chance that another rank or worker is ready is its busy share of the time, independent of the others. This gives the
mean stretch of a thread's computing. Times and stretches depend on each other and are solved by iteration.

An operator that is split over several threads ends with the last of them. If one has no core, the others spin and count
as computing, so k threads progress at the k-th power of one thread's rate. (With more threads than cores, OpenMP's
threads do not spin but yield.) The kernel measures how long computing really waited for a core. The ratio of that to
the model's stretch, due to other jobs on the host or to a better scheduler, is assumed to stay the same. Without
workers only the part stays that the workers cannot have caused. No thread waits for longer than others compute: while a
loop that needs k cores stands still, at least C − k + 1 cores run something else. If threads wait for each other, a
worker's computing may delay them for longer: see BARRIER.

Handing a batch over costs computing in the loop and in the worker. A loop without workers does not pay this, and has
its cores for itself while it does not fetch.

A worker puts each tensor into its own shared memory, after the kernel has cleared the pages, and passes a file
descriptor for it through a socket: one connection a tensor, with authentication at both ends (torch.multiprocessing's
reductions, the strategy file_descriptor). So both sides pay by the tensor and by the byte: the worker copies, and the
training thread has a page fault at the first touch of each page. Workers compute beside training. If training's
operators are split over all cores, this costs training more than the workers' own time.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace
from numpy.typing import NDArray

Times = NDArray[np.float64]

_BATCHES = 600
_ROUNDS = 12

# The parts of making a batch: reading, decoding and changing samples; collating them; copying to pinned memory.
SAMPLES, COLLATING, PINNING = "samples", "collating", "pinning"

_NOTHING: Times = np.zeros(1)

# The least share of a loop's own work that stays without the handover.
_LEFT = 0.1


class Handover(Struct, frozen=True):
    """The cost of handing a batch over from a worker, besides its fetch, ns of computing."""

    taking_ns: float = 0.0  # of the training thread
    sending_ns: float = 0.0  # of the worker

    def times(self, factor: float) -> Handover:
        """Return the same on a host that is slower by a factor."""
        return Handover(self.taking_ns * factor, self.sending_ns * factor)


class HandoverCost(Struct, frozen=True):
    """The cost of a batch's handover: the usual one, and its bounds."""

    usual: Handover = Handover()
    least: Handover = Handover()
    most: Handover = Handover()


# For a handover that delays no one.
NO_HANDOVER = HandoverCost()


class LoopTimes(Struct, frozen=True):
    """One rank's step and fetch times as recorded, in ns, without waits for a core."""

    workers: int
    prefetch: int
    own: Times  # of the loop between two batches
    own_cpu: float  # share of `own` that computes, in each of `threads`
    threads: int
    fetch: Times  # of a batch
    fetch_cpu: Times  # the part of `fetch` that computes
    cores: float  # of the host
    ranks: int  # how many ranks like this one share `cores`
    excess: tuple[float, float] = (1.0, 1.0)  # measured stretch ÷ the model's, of the loop and of a fetch
    excess_alone: float = np.nan  # of the loop without workers: the part that workers do not explain; NaN: as with them
    stretch: float = 1.0  # of the loop's computing, as measured
    others_cpu: float = np.nan  # of a batch of the other ranks on the host; NaN: as this one's
    handover: HandoverCost = NO_HANDOVER  # of a batch; with workers, `own` and `fetch_cpu` include it
    gap: float = 0.0  # the part of `fetch` that passes between a worker's fetches
    barrier: float = 1.0  # what workers' computing costs a loop whose threads wait for each other, as a multiple of it
    batches: int = 1  # of a step
    loaders: int = 1  # that give the batches in turn, each with so many workers
    alone: float = 1.0  # `own` ÷ the loop's own time as recorded: in the rest, it had no core
    collate: Times = field(default_factory=lambda: _NOTHING)  # the part of `fetch` that is collating
    collate_cpu: Times = field(default_factory=lambda: _NOTHING)  # the part of `fetch_cpu` that is collating
    pin: float = 0.0  # the pinning thread's time for a batch; 0: no such thread
    shared: float = 0.0  # what collating takes longer in a worker, into shared memory

    @property
    def batch_cpu(self) -> float:
        """The mean CPU time of a batch over the ranks that share the cores."""
        mine = float(self.fetch_cpu.mean())
        return mine if np.isnan(self.others_cpu) else (mine + (self.ranks - 1) * self.others_cpu) / self.ranks

    @property
    def costly(self) -> str:
        """The slowest part of making a batch over all workers: SAMPLES, COLLATING or PINNING."""
        whole = float(self.fetch.mean())
        return PINNING if self.pin * self.workers > whole else COLLATING if 2 * self.collate.mean() > whole else SAMPLES

    def without(self, part: str) -> LoopTimes:
        """Return the same if a part of making batches, SAMPLES, COLLATING or PINNING, cost nothing."""
        if part == PINNING:
            return replace(self, pin=0.0)
        fetch, cpu = self.collate, self.collate_cpu
        if part == COLLATING:
            fetch, cpu = self.fetch - fetch, self.fetch_cpu - cpu
        return replace(self._making(fetch, cpu), collate=_NOTHING, collate_cpu=_NOTHING)

    def cheaper(self, left: float) -> LoopTimes:
        """Return the same if the making of a batch, samples and collating alike, took this share of its time."""
        changed = self._making(self.fetch * left, self.fetch_cpu * left)
        return replace(changed, collate=self.collate * left, collate_cpu=self.collate_cpu * left)

    def _making(self, fetch: Times, cpu: Times) -> LoopTimes:
        if self.workers:  # the handover costs the same however a batch is made
            cpu = np.maximum(cpu, np.minimum(self.handover.least.sending_ns, self.fetch_cpu))
        others = self.others_cpu * float(cpu.mean()) / max(float(self.fetch_cpu.mean()), 1.0)
        return replace(self, fetch=fetch, fetch_cpu=cpu, others_cpu=others)

    def with_workers(self, workers: int) -> LoopTimes:
        """Return the same with so many workers: with the handover's cost for the first, without it for none."""
        if bool(workers) == bool(self.workers):
            return self
        cost = self.handover.usual if workers else self.handover.usual.times(-1)
        taking, sending, gap = cost.taking_ns, cost.sending_ns, self.gap
        # The estimated handover may exceed the recorded time.
        own, cpu = np.maximum(self.own + taking, _LEFT * self.own), np.maximum(self.fetch_cpu + sending, 0.0)
        if workers:
            fetch = np.maximum(self.fetch + sending, cpu)
        else:  # one thread then fetches, and cannot compute for longer than it takes
            fetch = np.maximum(self.fetch - gap - np.minimum(self.shared, _LESS * self.collate), 0.0)
            cpu = np.minimum(cpu, fetch)
        return replace(self, own=own, fetch=fetch, fetch_cpu=cpu, others_cpu=max(self.others_cpu + sending, 0.0))

    @property
    def where_workers_cost_least(self) -> LoopTimes:
        """The same at the lowest possible cost of workers: training waits for a core no longer than was measured."""
        own = self.own * self.alone ** (1 / self.threads_at_once - 1)
        return self._with(self.handover.least, LEAST_BARRIER, own)

    @property
    def where_workers_cost_most(self) -> LoopTimes:
        """The same at the highest possible cost of workers."""
        return self._with(self.handover.most, MOST_BARRIER, self.own)

    def _with(self, handover: Handover, barrier: float, own: Times) -> LoopTimes:
        known = replace(self.handover, usual=handover)
        return replace(self, handover=known, barrier=barrier if self.barrier > 1 else 1.0, own=own)

    @property
    def threads_at_once(self) -> int:
        """How many threads of the loop need a core at the same time for it to progress."""
        return self.threads if self.threads <= self.cores else 1


class Forecast(Struct, frozen=True):
    """The mean step of one rank with so many workers, and its wait for data, ns."""

    workers: int
    step_ns: float
    wait_ns: float


def replayed(times: LoopTimes, workers: int) -> Forecast:
    """Return the model's mean step with so many workers; 0: the loop fetches itself."""
    times = times.with_workers(workers)
    trained, fetched = float(times.own.mean()) * times.own_cpu, times.batch_cpu
    others = (times.ranks - (workers == 0)) * fetched + (times.ranks - 1) * times.threads * trained
    longest = max(
        1.0 + held_up(times) * others / max(times.cores - times.threads + 1, 1.0) / max(trained, 1.0), times.stretch
    )
    excess = times.excess[0] if workers or np.isnan(times.excess_alone) else times.excess_alone
    trains, fetches, forecast, pin = 1.0, 1.0, Forecast(workers, 0.0, 0.0), times.pin / times.loaders
    for _ in range(_ROUNDS):
        own, fetch = (
            times.own * (1 - times.own_cpu + times.own_cpu * trains),
            times.fetch + times.fetch_cpu * (fetches - 1),
        )
        forecast, overlap = replay(own, fetch, times.fetch_cpu, workers * times.loaders, times.prefetch, pin)
        step = forecast.step_ns
        busy, loop = (trained * trains / step, fetched * fetches / step), 1 - forecast.wait_ns / step
        now = stretches(times, workers * times.loaders, busy, loop, overlap)
        # Go half-way, or the two would oscillate.
        trains = (trains + min(max(1.0, now[0] * excess), longest)) / 2
        fetches = (fetches + max(1.0, now[1] * times.excess[1])) / 2
    # With the mean stretch the cores may seem to do a little more than they can.
    least = times.ranks * (times.threads * trained + fetched) / times.cores
    step, wait = max(forecast.step_ns, least), forecast.wait_ns
    return Forecast(workers, step * times.batches, wait * times.batches)


def held_up(times: LoopTimes) -> float:
    """Return the cost of others' computing for the loop, as a multiple of that computing."""
    return times.barrier if times.threads_at_once > 1 else 1.0


def replay(own: Times, fetch: Times, cpu: Times, workers: int, prefetch: int, pin: float = 0) -> tuple[Forecast, float]:
    """Return the mean step of one batch, and the share of the fetches' computing (`cpu`) during the loop's own work.

    `workers`: of all loaders that give batches in turn; `pin`: the time to pin a batch ÷ the number of loaders.
    """
    if not workers:
        wait = float(fetch.mean())
        return Forecast(0, float(own.mean()) + wait, wait), 0.0
    depth = workers * max(prefetch, 1)
    # The first two fillings of the queue are not a steady state.
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
    """Return n of the times, repeated if there are fewer, scaled to the mean of all."""
    chosen = np.resize(times, n)
    scaled: Times = chosen * (times.mean() / max(chosen.mean(), 1e-9))
    return scaled


def _overlap(begin: Times, own: Times, there: Times, fetch: Times, cpu: Times) -> float:
    """Return the share of the fetches' computing during the loop's own work; each fetch computes evenly throughout."""
    # The loop's accumulated work at any time, interpolated between the begins and ends of its batches.
    times, worked = np.column_stack((begin, begin + own)).ravel(), np.cumsum(own)
    until = np.column_stack((worked - own, worked)).ravel()
    inside = np.interp(there, times, until) - np.interp(there - fetch, times, until)
    total = float(cpu.sum())
    return float((cpu * inside / np.maximum(fetch, 1e-9)).sum()) / total if total else 0.0


def stretches(
    times: LoopTimes, workers: int, busy: tuple[float, float], loop: float, overlap: float
) -> tuple[float, float]:
    """Return how much longer computing takes in the loop and in a worker than with a core for every thread.

    `busy`: the shares of the time in which a rank's loop and its workers (their sum) are ready to compute; `loop`: the
    share in which the loop does not wait for data, on all ranks at once; `overlap`: the share of the workers' computing
    in that time.
    """
    trains, fetches = busy
    computes, others = trains / max(loop, 1e-9), times.ranks - 1

    def speed(itself: int, loops: int, fetchers: int, each: float, at_once: int = 1) -> float:
        ready = itself + times.threads * np.arange(loops + 1)[:, None] + np.arange(fetchers + 1)[None, :]
        chance = _chance(loops, computes)[:, None] * _chance(fetchers, each)[None, :]
        return float((chance * np.minimum(1.0, times.cores / ready) ** at_once).sum())

    def longer(progress: float) -> float:
        return 1.0 + held_up(times) * (1.0 / progress - 1.0)

    if not workers:
        waiting = speed(1, 0, others, fetches / max(1.0 - loop, 1e-9))
        return longer(speed(times.threads, others, 0, 0.0, times.threads_at_once)), 1.0 / waiting
    fetchers, each = times.ranks * workers, fetches / workers
    then, otherwise = each * overlap / max(loop, 1e-9), each * (1 - overlap) / max(1 - loop, 1e-9)
    training, waiting = speed(1, times.ranks, fetchers - 1, then), speed(1, 0, fetchers - 1, otherwise)
    fetching = overlap * training + (1.0 - overlap) * waiting
    return longer(speed(times.threads, others, fetchers, then, times.threads_at_once)), 1.0 / fetching


def _chance(n: int, share: float) -> Times:
    """Return the binomial distribution: the probability of each number of n being ready, each for a share of time."""
    share = min(max(share, 1e-9), 1 - 1e-9)
    k = np.arange(n + 1, dtype=float)
    factorial = np.concatenate(([0.0], np.cumsum(np.log(k[1:]))))
    logs: Times = factorial[n] - factorial - factorial[::-1] + k * np.log(share) + (n - k) * np.log1p(-share)
    return np.exp(logs)


_MS, _MB = 1e6, 1e6

# CPU time of the training thread and of the worker: for a batch, for each of its tensors, and for each megabyte.
# Measured with batches of 1 to 40 tensors of 1 kB to 4 MB, torch 2.13 on two cores of an AMD EPYC.
_TAKING = (0.2 * _MS, 0.15 * _MS, 0.3 * _MS)

_SENDING = (0.2 * _MS, 0.16 * _MS, 0.9 * _MS)

# What `default_collate` takes longer in a worker, which allocates each tensor in shared memory: for each tensor, and
# for each megabyte. Measured on a host of that kind with batches of 0.2 to 12 MB: 0.85 to 1.04 ms a megabyte, and never
# less than this share of all collating.
_SHARED, _LESS = (0.1 * _MS, 0.9 * _MS), 0.75

# A host may be faster or slower than that one by this factor.
HOSTS_DIFFER = 2.0

# The tensors of a batch if they were not counted: features and targets, and at most a recommender's tables.
_USUAL, _MANY = 2, 32

# The cost of a millisecond of a worker's computing for an operator that is split over all cores, ms: more than one, as
# all its threads wait at its end for the one that lost its core, and caches are cold afterwards. Measured: 1.3 for
# convolutions of tens of milliseconds (workloads/ddp_resnet.py, two threads on two cores), 1.6 for those of one
# millisecond (pytorch/examples mnist).
BARRIER = 1.4

LEAST_BARRIER, MOST_BARRIER = 1.0, 2.0


def handover(tensors: float, size: float) -> Handover:
    """Return the cost of handing over a batch of so many tensors and bytes."""

    def cost(a_batch: float, a_tensor: float, a_megabyte: float) -> float:
        return a_batch + a_tensor * tensors + a_megabyte * size / _MB

    return Handover(cost(*_TAKING), cost(*_SENDING))


def shared(tensors: float, size: float) -> float:
    """Return what collating a batch of so many tensors and bytes takes longer into shared memory; -1: not counted."""
    return _SHARED[0] * tensors + _SHARED[1] * size / _MB if tensors >= 0 else 0.0


def handover_cost(tensors: float, size: float, taken_ns: float) -> HandoverCost:
    """Return the handover of a batch; tensors −1: not counted; `taken_ns`: the training thread's time, NaN: unknown."""
    usual = handover(*((tensors, size) if tensors >= 0 else (_USUAL, 0.0)))
    least, most = usual.times(1 / HOSTS_DIFFER), usual.times(HOSTS_DIFFER)
    if tensors < 0:
        least, most = Handover(), handover(_MANY, 0.0).times(HOSTS_DIFFER)
    if taken_ns >= 0:
        usual, least, most = (Handover(taken_ns, one.sending_ns) for one in (usual, least, most))
    return HandoverCost(usual, least, most)
