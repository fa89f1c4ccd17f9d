"""What the step would be with another number of loader workers: the run's own batches, replayed.

A worker fetches its batches one after the other, batch k is worker k mod n's, and the training loop takes them in order
(torch.utils.data; the depth of the queue is n × prefetch_factor). So batch k is there at

    there(k) = max(there(k − n), taken(k − n · prefetch)) + fetch(k)        its worker is free, and was told to
    taken(k) = max(there(k), taken(k − 1) + own(k − 1))                     in order, when the loop asks

with the recorded times of fetching and of the loop's own work between batches. The rate is then n ÷ fetch, as
DS-Analyzer has it (Mohan et al., Analyzing and Mitigating Data Stalls in DNN Training, VLDB 2021), up to the loop's.

Cores set the other limit. What a fetch waits for storage is the same however many wait; what it computes takes longer
once more threads are ready to run than there are cores, and so does the loop's own work. A thread that finds N ready on
C cores runs at min(1, C ÷ N), as a fair scheduler lets it. Ranks train at the same time, for they wait for each other;
who of them, and of the workers, is ready then is taken from how long each is busy, independently of the others. That
gives the mean stretch of a thread's computing; times and stretches are solved for together. Where an
operator is split over several threads, it ends with the last of them: one that has no core holds up all, which spin
meanwhile and count as computing, so that k threads get on with the k-th power of what one does. (With more threads than
cores they do not spin: OpenMP's then give up their core to each other.) The kernel
tells how long computing really waited for a core: by how much that differs from the model's stretch of the run as it
was, for other jobs on the host or for a scheduler that does better, is taken to stay. But nobody is held up for longer
than others compute: while a loop that needs k cores stands still, C − k + 1 of them at least are somebody else's.

What takes longer of making a batch, reading its samples or collating them, bounds what making that cheaper can give:
the same model where it costs nothing, and the other of the two is as it was. Collating computes; what a fetch waits for
storage is its samples'. What one rank waited for another that had no core is gone with what took it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import settings
from dlprof.analysis.engine import Job, Maybe
from dlprof.analysis.input.loader import gained
from dlprof.analysis.step.breakdown import part
from dlprof.analysis.step.savings import saving_input
from dlprof.errors import NotMeasured

Times = NDArray[np.float64]

# A replay that does not give back the run as it was, within so much of the step, says nothing of another.
TRUSTED = 0.2

# So many workers a rank are looked at: 16, where fetching only waits, or more where a rank has cores for two of each.
MOST_WORKERS = 16

# Workers are added while a step gets shorter by this share of it: what is proposed is the fewest that come so near to
# the best. A hundredth is below any run's own noise.
WORTH = 0.01

# Ranks that are looked at one by one.
MOST_RANKS = 8

# Fetches of each worker that tell it from the others.
_ENOUGH = 3

_BATCHES = 600
_ROUNDS = 12

# Making a batch: reading, decoding and changing its samples, and putting them together.
SAMPLES, COLLATING = "samples", "collating"


def _nothing() -> Times:
    return np.zeros(1)


@dataclass(frozen=True)
class Pace:
    """One rank's input as it was recorded. Times in ns, without what was waited for a core."""

    workers: int
    prefetch: int
    own: Times  # of the loop between two batches, one a step
    own_cpu: float  # share of it that computes, in each of `threads`
    threads: int
    fetch: Times  # of a batch
    fetch_cpu: Times  # of it, computing
    cores: float  # of the host, and
    ranks: int  # how many ranks like this one share them
    beside: tuple[float, float] = (1.0, 1.0)  # measured stretch ÷ the model's, of the loop and of a fetch
    stretch: float = 1.0  # of the loop's computing, as measured
    others_cpu: float = float("nan")  # of a batch of those other ranks; NaN: as this one's
    collate: Times = field(default_factory=_nothing)  # what of `fetch` is collating, and
    collate_cpu: Times = field(default_factory=_nothing)  # of `fetch_cpu`

    @property
    def batch_cpu(self) -> float:
        """What a batch computes in the mean over the ranks that share the cores."""
        mine = float(self.fetch_cpu.mean())
        return mine if np.isnan(self.others_cpu) else (mine + (self.ranks - 1) * self.others_cpu) / self.ranks

    @property
    def together(self) -> int:
        """How many threads of the loop must all have a core for it to get on."""
        return self.threads if self.threads <= self.cores else 1


@dataclass(frozen=True)
class Forecast:
    """The mean step of one rank with so many workers, ns, and what of it the loop waits for data."""

    workers: int
    step_ns: float
    wait_ns: float


@dataclass(frozen=True)
class Plan:
    """What more workers would give: the worst rank's forecasts, the chosen one of them, and what the run gains, ns."""

    forecasts: tuple[Forecast, ...]
    chosen: Forecast
    gain_ns: float

    @property
    def now(self) -> Forecast:
        """The forecast with as many workers as there are."""
        return self.forecasts[0]


def replayed(pace: Pace, workers: int) -> Forecast:
    """Return the mean step with so many workers as the model has it; 0: the loop fetches itself."""
    trains, fetches = 1.0, 1.0
    trained = float(pace.own.mean()) * pace.own_cpu
    fetched = pace.batch_cpu
    others = (pace.ranks - (workers == 0)) * fetched + (pace.ranks - 1) * pace.threads * trained
    longest = max(1.0 + others / max(pace.cores - pace.threads + 1, 1.0) / max(trained, 1.0), pace.stretch)
    told = Forecast(workers, 0.0, 0.0)
    for _ in range(_ROUNDS):
        own = pace.own * (1 - pace.own_cpu + pace.own_cpu * trains)
        told, beside = _replay(own, pace.fetch + pace.fetch_cpu * (fetches - 1), pace.fetch_cpu, workers, pace.prefetch)
        step = told.step_ns
        busy, loop = (trained * trains / step, fetched * fetches / step), 1 - told.wait_ns / step
        now = _stretches(pace, workers, busy, loop, beside)
        # Half-way, or the two would swing around each other.
        trains = (trains + min(max(1.0, now[0] * pace.beside[0]), longest)) / 2
        fetches = (fetches + max(1.0, now[1] * pace.beside[1])) / 2
    # The mean stretch may promise a little more than all cores at work can do.
    least = pace.ranks * (pace.threads * trained + fetched) / pace.cores
    return replace(told, step_ns=max(told.step_ns, least))


def _replay(own: Times, fetch: Times, cpu: Times, workers: int, prefetch: int) -> tuple[Forecast, float]:
    """Return the mean step, and the share of what fetches compute (`cpu`) that falls into the loop's own work."""
    if not workers:
        wait = float(fetch.mean())
        return Forecast(0, float(own.mean()) + wait, wait), 0.0
    depth = workers * max(prefetch, 1)
    # The first two fillings of the queue are no steady state.
    skip = 2 * depth
    n = max(_BATCHES, 2 * skip)
    owns, takes = np.resize(own, n).tolist(), np.resize(fetch, n).tolist()
    there, taken = [0.0] * n, [0.0] * n
    asked = begun = waited = 0.0
    for k in range(n):
        free = there[k - workers] if k >= workers else 0.0
        told = taken[k - depth] if k >= depth else 0.0
        there[k] = max(free, told) + takes[k]
        taken[k] = max(there[k], asked)
        if k == skip:
            begun, waited = asked, 0.0
        waited += taken[k] - asked
        asked = taken[k] + owns[k]
    mean = Forecast(workers, (asked - begun) / (n - skip), waited / (n - skip))
    return mean, _beside(np.array(taken), np.resize(own, n), np.array(there), np.resize(fetch, n), np.resize(cpu, n))


def _beside(begin: Times, own: Times, there: Times, fetch: Times, cpu: Times) -> float:
    """Return the share of what fetches compute that falls into the loop's own work; each computes evenly throughout."""
    # What the loop has worked until any time, from where its batches begin and end.
    times, worked = np.column_stack((begin, begin + own)).ravel(), np.cumsum(own)
    until = np.column_stack((worked - own, worked)).ravel()
    inside = np.interp(there, times, until) - np.interp(there - fetch, times, until)
    total = float(cpu.sum())
    return float((cpu * inside / np.maximum(fetch, 1e-9)).sum()) / total if total else 0.0


def _stretches(pace: Pace, workers: int, busy: tuple[float, float], loop: float, beside: float) -> tuple[float, float]:
    """Return how much longer computing takes the loop, and a worker, than with a core for every thread.

    `busy`: the share of the time that a rank's loop, and its workers together, are ready to compute; `loop`: that the
    loop does not wait for data, on all ranks at once; `beside`: the share of what workers compute that is then.
    """
    trains, fetches = busy
    computes, others = trains / max(loop, 1e-9), pace.ranks - 1

    def pace_of(itself: int, loops: int, fetchers: int, each: float, together: int = 1) -> float:
        ready = itself + pace.threads * np.arange(loops + 1)[:, None] + np.arange(fetchers + 1)[None, :]
        chance = _chance(loops, computes)[:, None] * _chance(fetchers, each)[None, :]
        return float((chance * np.minimum(1.0, pace.cores / ready) ** together).sum())

    if not workers:
        alone = pace_of(pace.threads, others, 0, 0.0, pace.together)
        return 1.0 / alone, 1.0 / pace_of(1, 0, others, fetches / max(1.0 - loop, 1e-9))
    fetchers, each = pace.ranks * workers, fetches / workers
    then, otherwise = each * beside / max(loop, 1e-9), each * (1 - beside) / max(1 - loop, 1e-9)
    training, waiting = pace_of(1, pace.ranks, fetchers - 1, then), pace_of(1, 0, fetchers - 1, otherwise)
    return (
        1.0 / pace_of(pace.threads, others, fetchers, then, pace.together),
        1.0 / (beside * training + (1.0 - beside) * waiting),
    )


def _chance(n: int, share: float) -> Times:
    """Return the binomial distribution: how likely each number of n is ready, each for such a share of the time."""
    share = min(max(share, 1e-9), 1 - 1e-9)
    k = np.arange(n + 1, dtype=float)
    factorial = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, n + 1, dtype=float)))))
    logs: Times = factorial[n] - factorial - factorial[::-1] + k * np.log(share) + (n - k) * np.log1p(-share)
    return np.exp(logs)


def pace(
    loader_means: pd.DataFrame,
    step_means: pd.DataFrame,
    fetch_series: pd.DataFrame,
    step_series: pd.DataFrame,
    breakdown: Maybe[pd.DataFrame],
    job: Job,
    rank: int,
) -> Pace:
    """Return rank's pace; raises NotMeasured where its fetches were not recorded, or its steps take several batches."""
    loader = settings.training_loader(job, rank)
    workers, cpu = loader.get("num_workers"), job.facts[rank].get("cpu") or {}
    cores = settings.cores(job, rank)
    means = _of(loader_means, rank)
    steps = _of(step_means, rank)
    fetches = in_turn(_of(fetch_series, rank))
    series = _of(step_series, rank)
    series = series[series["steady"].astype(bool) & (series["fetch_ns"] >= 0)]
    if not isinstance(workers, int) or cores is None or not (len(means) and len(fetches) and len(series)):
        raise NotMeasured("what fetching a batch takes was not recorded")
    row, step = means.iloc[0], steps.iloc[0]
    if not 0.9 < row["batches"] / step["steps"] < 1.1:
        raise NotMeasured("a step takes more than one batch")
    fetch, used, delay, collate = (
        fetches[c].to_numpy(dtype=float) for c in ("dur_ns", "cpu_ns", "delay_ns", "collate_ns")
    )
    if (used < 0).all() or np.isnan(row["cores"]):
        raise NotMeasured("what fetching and training use of the cores was not recorded")
    used = np.where(used < 0, used[used >= 0].mean(), used)
    delay = np.minimum(np.maximum(delay, 0.0), np.maximum(fetch - used, 0.0))
    collate = np.clip(collate, 0.0, fetch)
    # It computes or waits for a core, and had its core as often as the rest of the batch.
    together = np.minimum(collate, used + delay)
    had = used / np.maximum(used + delay, 1.0)
    # Taking a batch that is there is the loop's own work.
    taken = 0.0 if np.isnan(row["taken_ns"]) else float(row["taken_ns"])
    own = (series["dur_ns"] - (series["fetch_ns"] - taken).clip(lower=0)).to_numpy(dtype=float)
    if not settings.on_cpu(job) and rank not in breakdown.lacking:
        # A host that waits for no data only launches: the loop is as fast as its device.
        own = np.maximum(own, float(step["step_ns"]) - part(breakdown.get(), "input_wait")[rank])
    inside = 0.0 if workers else 1.0  # the share of fetching that the loop's own figures hold
    own_delay = (0.0 if np.isnan(row["delayed"]) else row["delayed"]) * step["step_ns"] - inside * delay.mean()
    own_used = row["cores"] * step["step_ns"] - inside * used.mean()
    threads = int(cpu.get("torch_threads") or 1) if settings.on_cpu(job) else 1
    # The kernel tells what the training thread waited for a core; what the others did, it spun.
    alone = min(max(1.0 - own_delay / own.mean(), 0.1), 1.0) ** (threads if threads <= cores else 1)
    needs = fetch - delay + float(fetches["gap_ns"].iloc[0])
    recorded = Pace(
        workers=workers,
        prefetch=int(loader.get("prefetch_factor") or 2),
        own=own * alone,
        own_cpu=min(max(own_used, 0.0) / threads / (own.mean() * alone), 1.0),
        threads=threads,
        fetch=needs,
        fetch_cpu=used,
        cores=cores,
        ranks=settings.neighbours(job, rank),
        others_cpu=_others_cpu(fetch_series, job, rank),
        collate=collate - together * (1 - had),
        collate_cpu=together * had,
    )
    trained, waited = recorded.own.mean() * recorded.own_cpu, own.mean() * (1 - alone)
    fetched = recorded.batch_cpu * (1 + delay.mean() / max(used.mean(), 1.0))
    _, while_own = _replay(own, fetch + float(fetches["gap_ns"].iloc[0]), used, workers, recorded.prefetch)
    busy = (trained + waited) / step["step_ns"], fetched / step["step_ns"]
    model = _stretches(recorded, workers, busy, own.mean() / step["step_ns"], while_own)
    stretch = 1 + waited / max(trained, 1.0)
    beside = stretch / model[0], (1 + delay.mean() / max(used.mean(), 1.0)) / model[1]
    return replace(recorded, beside=beside, stretch=stretch)


def _others_cpu(fetch_series: pd.DataFrame, job: Job, rank: int) -> float:
    """Return what a batch of other ranks of a host computes in the mean, ns; NaN: there are none, or nobody knows."""
    host = settings.host(job, rank)
    others = [r for r in job.ranks if r != rank and settings.host(job, r) == host]
    frame = fetch_series
    frame = frame[frame["rank"].isin(others) & (frame["cpu_ns"] >= 0)]
    return float(frame.groupby("rank")["cpu_ns"].mean().mean())


def in_turn(fetches: pd.DataFrame) -> pd.DataFrame:
    """Put fetches in the order in which their batches are taken: each worker's one, in turn; what is over is left out.

    As they stand, where a worker has too few of them for that.
    """
    turn = fetches.groupby("worker").cumcount()
    whole = int(fetches.groupby("worker").size().min()) if len(fetches) else 0
    if whole < _ENOUGH:
        return fetches
    return fetches.assign(turn=turn)[turn < whole].sort_values(["turn", "worker"], kind="stable")


def forecasts(
    loader_means: pd.DataFrame,
    step_means: pd.DataFrame,
    fetch_series: pd.DataFrame,
    step_series: pd.DataFrame,
    breakdown: Maybe[pd.DataFrame],
    job: Job,
    rank: int,
    upto: int | None = None,
) -> tuple[Forecast, ...]:
    """Return the mean step of a rank as it is, then with 1, 2, … workers, as far as more of them may still help.

    Where `upto` is told, only with that number.

    What the model says differs from what was measured is taken off all of them. Raises NotMeasured where that is more
    than TRUSTED of the step, and as `pace` does.
    """
    recorded = pace(loader_means, step_means, fetch_series, step_series, breakdown, job, rank)
    measured = float(_of(step_means, rank)["step_ns"].iloc[0])
    now = replayed(recorded, recorded.workers)
    off = now.step_ns - measured
    if abs(off) > TRUSTED * measured:
        raise NotMeasured(f"the recorded batches explain a step of {now.step_ns / 1e6:.1f} ms only")
    if upto is not None:
        return tuple(replace(f, step_ns=f.step_ns - off) for f in (now, replayed(recorded, upto)))
    given = [now]
    best, since = np.inf, 0
    for n in range(1, max(MOST_WORKERS, int(2 * recorded.cores / recorded.ranks), recorded.workers) + 1):
        given.append(now if n == recorded.workers else replayed(recorded, n))
        since = 0 if given[-1].step_ns < best * (1 - WORTH) else since + 1
        best = min(best, given[-1].step_ns)
        # Two that gained nothing may be the two that make one round of an uneven number; three are enough.
        if n > recorded.workers and since >= 3:
            break
    return tuple(replace(f, step_ns=f.step_ns - off) for f in given)


def proposed(given: tuple[Forecast, ...]) -> Forecast:
    """Return the fewest workers that come within WORTH of the best."""
    best = min(f.step_ns for f in given)
    return min((f for f in given if f.step_ns <= best * (1 + WORTH)), key=lambda f: f.workers)


def planned(
    loader_means: Maybe[pd.DataFrame],
    step_means: Maybe[pd.DataFrame],
    fetch_series: Maybe[pd.DataFrame],
    step_series: Maybe[pd.DataFrame],
    breakdown: Maybe[pd.DataFrame],
    fetch_gains: Maybe[pd.DataFrame],
    own_time: Maybe[pd.DataFrame],
    job: Job,
    wait: Mapping[int, float],
    worst: int,
) -> Plan | None:
    """Choose the workers that the rank which waits most needs, and predict what all ranks gain by them.

    `wait`: each rank's exposed wait for data in the mean steady step, ns. None where the batches were not recorded.
    """
    try:
        given = forecasts(
            loader_means.get(), step_means.get(), fetch_series.get(), step_series.get(), breakdown, job, worst
        )
        chosen = proposed(given)
        freed = {worst: _freed(given, chosen.workers)}
        for rank in sorted((r for r in wait if r != worst and wait[r]), key=lambda r: -wait[r])[: MOST_RANKS - 1]:
            freed[rank] = _freed(
                forecasts(
                    loader_means.get(),
                    step_means.get(),
                    fetch_series.get(),
                    step_series.get(),
                    breakdown,
                    job,
                    rank,
                    upto=chosen.workers,
                ),
                chosen.workers,
            )
    except NotMeasured:
        return None
    # Ranks beyond those that were looked at wait less than they, and are taken to be like the worst.
    gone = {r: gained(fetch_gains, r, w, freed.get(r, freed[worst])) for r, w in wait.items()}
    return Plan(given, chosen, saving_input(step_series.get(), own_time.get(), gone))


def costly(
    loader_means: pd.DataFrame,
    step_means: pd.DataFrame,
    fetch_series: pd.DataFrame,
    step_series: pd.DataFrame,
    breakdown: Maybe[pd.DataFrame],
    job: Job,
    rank: int,
) -> str:
    """Name what takes longer of making a rank's batches: SAMPLES or COLLATING; raises as `pace` does."""
    recorded = pace(loader_means, step_means, fetch_series, step_series, breakdown, job, rank)
    return COLLATING if 2 * recorded.collate.mean() > recorded.fetch.mean() else SAMPLES


def cheaper(recorded: Pace, part: str) -> Pace:
    """Return a rank's pace where a part of making its batches costs nothing."""
    fetch, cpu = recorded.collate, recorded.collate_cpu
    if part == COLLATING:
        fetch, cpu = recorded.fetch - fetch, recorded.fetch_cpu - cpu
    less = float(cpu.mean()) / max(float(recorded.fetch_cpu.mean()), 1.0)
    return replace(
        recorded,
        fetch=fetch,
        fetch_cpu=cpu,
        others_cpu=recorded.others_cpu * less,
        collate=_nothing(),
        collate_cpu=_nothing(),
    )


def step_with_cheaper(
    own_time: pd.DataFrame,
    loader_means: Maybe[pd.DataFrame],
    step_means: pd.DataFrame,
    fetch_series: Maybe[pd.DataFrame],
    step_series: Maybe[pd.DataFrame],
    breakdown: Maybe[pd.DataFrame],
    job: Job,
    part: str,
) -> float:
    """Return the mean step on a CPU if a part of making batches cost nothing, ns; raises as `pace` does.

    Ranks compute what they did, on the cores that fetching leaves them. Where a rank computes not, it is transfer, the
    same for all of them, or waiting for others that had less of the cores: the least that any rank has of it stays.
    """
    waits = own_time.set_index("rank")["wait_ns"]
    paces = {
        rank: pace(loader_means.get(), step_means, fetch_series.get(), step_series.get(), breakdown, job, rank)
        for rank in job.ranks
    }
    stands = {r: max(float(p.own.mean()) * (1 - p.own_cpu) - float(waits[r]), 0.0) for r, p in paces.items()}
    stays = min(stands.values())

    def bare(recorded: Pace) -> Pace:
        computes = float(recorded.own.mean()) * recorded.own_cpu
        own = max(computes + stays, 1.0)
        return replace(cheaper(recorded, part), own=np.array([own]), own_cpu=computes / own)

    def least(changed: Pace) -> float:
        fetch, workers = float(changed.fetch.mean()), changed.workers
        return max(float(changed.own[0]), fetch / workers) if workers else float(changed.own[0]) + fetch

    slowest = sorted((bare(p) for p in paces.values()), key=least)[-MOST_RANKS:]
    return max(replayed(changed, changed.workers).step_ns for changed in slowest)


def freed_by_cheaper(
    loader_means: pd.DataFrame,
    step_means: pd.DataFrame,
    fetch_series: pd.DataFrame,
    step_series: pd.DataFrame,
    breakdown: Maybe[pd.DataFrame],
    job: Job,
    rank: int,
    part: str,
) -> float:
    """Return the share of a rank's wait that is gone where a part of making batches costs nothing; raises as `pace`."""
    recorded = pace(loader_means, step_means, fetch_series, step_series, breakdown, job, rank)
    return _freed_by(recorded, cheaper(recorded, part))


def freed_by_equal_workers(
    loader_means: pd.DataFrame,
    step_means: pd.DataFrame,
    fetch_series: pd.DataFrame,
    step_series: pd.DataFrame,
    breakdown: Maybe[pd.DataFrame],
    job: Job,
    rank: int,
    slow: int,
) -> float:
    """Return share of a rank's wait that is gone when one worker fetches as the others do; raises as `pace` does."""
    recorded = pace(loader_means, step_means, fetch_series, step_series, breakdown, job, rank)
    by = in_turn(_of(fetch_series, rank))["worker"].to_numpy()
    others = np.flatnonzero(by != slow)
    # In the place of each fetch of the slow worker stands one of the others', in their order.
    place = np.arange(len(by))
    place[by == slow] = np.resize(others, int((by == slow).sum()))
    return _freed_by(recorded, replace(recorded, fetch=recorded.fetch[place], fetch_cpu=recorded.fetch_cpu[place]))


def _freed_by(recorded: Pace, changed: Pace) -> float:
    now, then = (replayed(p, p.workers) for p in (recorded, changed))
    return min(max((now.step_ns - then.step_ns) / now.wait_ns, 0.0), 1.0) if now.wait_ns else 0.0


def _freed(given: tuple[Forecast, ...], workers: int) -> float:
    """Return share of the wait that is gone with so many workers; what computing is then slower counts against it."""
    then = next((f for f in given[1:] if f.workers == workers), given[0])
    wait = given[0].wait_ns
    return min(max((given[0].step_ns - then.step_ns) / wait, 0.0), 1.0) if wait else 0.0


def _of(frame: pd.DataFrame, rank: int) -> pd.DataFrame:
    return frame[frame["rank"] == rank]
