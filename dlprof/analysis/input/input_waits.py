"""How long each rank waits for data, and what a faster loader, or one with fewer workers, would save.

The recorded batches are replayed. The part of making a batch that takes longer, reading its samples or collating them,
bounds what making it cheaper can give: it is replayed at no cost, and the other part as it was. Collating computes;
what a fetch waits for storage is its samples'. What one rank waited for another that had no core is gone with what took
it.

On a CPU, workers may cost training more than they fetch: a worker computes on the cores that training needs, and each
batch that it makes has to be handed over. Where fetching a batch takes less than that, the training thread had better
fetch it itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

import numpy as np
import pandas as pd
from msgspec import Struct, field
from msgspec.structs import replace
from numpy.typing import NDArray

from dlprof.analysis import idioms, settings
from dlprof.analysis.communication.blame import blame
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, across_ranks, by_rank, maybe, needs
from dlprof.analysis.input.fetch_replay import (
    BARRIER,
    NO_HANDOVER,
    PINNING,
    SAMPLES,
    Forecast,
    LoopTimes,
    handover_cost,
    held_up,
    replay,
    replayed,
    shared,
    stretches,
)
from dlprof.analysis.input.loader import (
    before_forward,
    fetch_gains,
    fetch_series,
    gained,
    loader_calls,
    loader_means,
    pinning,
    repeated_samples,
    worker_means,
)
from dlprof.analysis.machine.samples import sample_means
from dlprof.analysis.source.line_shares import CostlyLine, costliest, costly_lines
from dlprof.analysis.source.statements import Trees, filtered_after, parts_taken, statements
from dlprof.analysis.step.breakdown import breakdown, most_saved_ns, part
from dlprof.analysis.step.savings import own_time, saving_input
from dlprof.analysis.timeline.stalls import pauses_in_fetch
from dlprof.analysis.timeline.steps import mean_step_ns, step_means, step_series
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.result import Place
from dlprof.units import digits, duration, percent, size

# From here on a wait is worth a change: XProf's input pipeline analyzer and the TensorBoard plugin say 5 %.
NOTABLE_SHARE = 0.05

# More workers are what is missing where they give the larger part of what there is to gain.
LARGER_PART = 0.5

# A replay that differs by more than this share from the measured step is not used for predictions.
TRUSTED = 0.2

# If other processes slow the loop's computing by more than this factor, their load with more workers is unpredictable.
DISTURBED = 1.5

# The most workers a rank that are tried, or two for each of its cores if that is more.
MOST_WORKERS = 16

# The proposal is the fewest workers within this share of the best step. A hundredth is below any run's own noise.
WORTH = 0.01

# The most ranks that are replayed one by one.
MOST_RANKS = 8

# A rank that waits for another rank's data for less than this share of the step is not named (estimate.LEAST_SHARE).
LEAST_SHARE = 0.02

# Workers slow all other computation on the host. A rank that waits for data launches late. Smaller batches are copied
# faster.
SAVES_FROM = ("computation", "communication", "copy", "input_wait", "optimizer_host", "host", "launch_latency", "other")
# What the training thread makes for a batch, it has to collect.
MADE_HERE = ("garbage_collection",)


@across_ranks
def input_waits(
    loader_calls: Frame = needs(loader_calls),
    before_forward: tuple[int, float] | None = needs(before_forward),
    mean_step_ns: Maybe[float] = maybe(mean_step_ns),
    breakdown: Maybe[Frame] = maybe(breakdown),
    fetch_gains: Maybe[Frame] = maybe(fetch_gains),
    loader_means: Maybe[Frame] = maybe(loader_means),
) -> pd.DataFrame:
    """Return each rank's wait for data (wait_ns) and its time to take ready batches (taken_ns) in a mean steady step.

    wait_ns is the exposed wait; with a device, how much shorter the rank's own step would be without it. Raises
    DoesNotApply where no loader was seen.
    """
    if not loader_calls["calls"].any():
        why = "no DataLoader was seen; time to get data in another way counts as the host's"
        if before_forward is not None:
            rank, ns = before_forward
            lead = f"{duration(ns)} of each step ({percent(ns / mean_step_ns.get())})"
            why += f"; on rank {rank}, {lead} pass before the first forward"
        raise DoesNotApply(why)
    wait = part(breakdown.get(), "input_wait")
    if not fetch_gains.lacking:
        gains = fetch_gains.get()
        wait |= by_rank(gains[gains["left"] == 0], "gain_ns")
    means = loader_means.or_none()
    takes = {} if means is None else by_rank(means.assign(ns=means["taken_ns"] * means["step_batches"]), "ns")
    taken = {r: min(takes.get(r, 0.0), ns) for r, ns in wait.items()}
    return pd.DataFrame(
        [(r, ns - taken[r], taken[r]) for r, ns in wait.items()], columns=["rank", "wait_ns", "taken_ns"]
    )


@across_ranks
def input_cost_ns(
    input_waits: Frame = needs(input_waits),
    step_series: Frame = needs(step_series),
    own_time: Frame = needs(own_time),
    breakdown: Frame = needs(breakdown),
    job: Job = needs(JOB),
) -> float:
    """Return what the job would gain without any wait for data, ns of the mean steady step."""
    gone = by_rank(input_waits, "wait_ns")
    most = most_saved_ns(breakdown, ("input_wait",) if settings.on_cpu(job) else SAVES_FROM)
    return min(saving_input(step_series, own_time, gone), most)


class Starving(Struct, frozen=True):
    """The rank that waits most for data, its training loader, and which ranks wait as well. Times in ns a step."""

    rank: int
    wait_ns: float
    step_ns: float
    workers: int | None  # of its loader; None: not known, but not none
    loader: settings.Settings
    cores: int | None  # that the rank can count on
    alike: tuple[int, ...]  # the ranks that wait at least half as long, itself among them
    others: tuple[int, ...]  # all others
    culprit: int  # which of `alike` the others wait for
    victims: Mapping[int, float]  # how long each rank waits for it, where that is notable
    threads: int = 0  # that its operators are split over; 0: not known, or it has a device


@across_ranks
def starving(
    input_waits: Frame = needs(input_waits),
    mean_step_ns: float = needs(mean_step_ns),
    loader_calls: Frame = needs(loader_calls),
    blame: Maybe[Frame] = maybe(blame),
    job: Job = needs(JOB),
) -> Starving:
    """Return the rank that waits most for data, and the ranks that wait for it if all ranks' traces are present."""
    wait = by_rank(input_waits, "wait_ns")
    rank = max(wait, key=lambda rank: wait[rank])
    loader = settings.training_loader(job, rank)
    workers = loader.get("num_workers")
    if not isinstance(workers, int):
        # A trace without settings still names the iterator's class, which shows whether there are workers.
        workers = 0 if loader_calls.set_index("rank")["in_process"].get(rank) else None
    alike = tuple(sorted(r for r, ns in wait.items() if ns >= wait[rank] / 2))
    others = tuple(r for r in job.ranks if r not in alike)
    culprit, victims, known = -1, {}, blame.or_none()
    if known is not None:
        known = known[(known["category"] == "input_wait") & known["culprit"].isin(alike)]
        known = known[known["ns"] >= LEAST_SHARE * mean_step_ns]
        culprit = int(str(known.groupby("culprit")["ns"].sum().idxmax())) if len(known) else -1
        victims = by_rank(known[known["culprit"] == culprit], "ns")
    cores = settings.cores_per_rank(job, rank)
    threads = (settings.threads(job, rank) if settings.on_cpu(job) else None) or 0
    return Starving(rank, wait[rank], mean_step_ns, workers, loader, cores, alike, others, culprit, victims, threads)


# The fewest fetches of each worker with which their order is known.
_ENOUGH = 3

# The batches of a step are a whole number if their mean is within this share of one: a run may end within a step.
_UNEVEN = 0.1


class AllLoopTimes(Struct, frozen=True):
    """The step and fetch times of all ranks; each rank's `LoopTimes` is built at the first request."""

    loader_means: pd.DataFrame
    step_means: pd.DataFrame
    fetch_series: pd.DataFrame
    step_series: pd.DataFrame
    input_waits: Maybe[pd.DataFrame]
    pinning: Maybe[pd.DataFrame]
    job: Job
    _known: dict[int, LoopTimes] = field(default_factory=dict)

    def of(self, rank: int) -> LoopTimes:
        """Return a rank's times; raise NotMeasured if its fetches were not recorded or its steps' batches vary."""
        if rank not in self._known:
            self._known[rank] = self._made(rank)
        return self._known[rank]

    def step_ns(self, rank: int) -> float:
        """Return the mean steady step of a rank as measured, ns."""
        return float(_of(self.step_means, rank)["step_ns"].iloc[0])

    def workers_in_turn(self, rank: int) -> NDArray[np.int64]:
        """Return the worker of each of a rank's fetches."""
        made: NDArray[np.int64] = in_turn(_of(self.fetch_series, rank))["worker"].to_numpy()
        return made

    def _made(self, rank: int) -> LoopTimes:
        loader, on_cpu = settings.training_loader(self.job, rank), settings.on_cpu(self.job)
        workers, cores = loader.get("num_workers"), settings.cores(self.job, rank)
        means, fetches = _of(self.loader_means, rank), in_turn(_of(self.fetch_series, rank))
        series = _of(self.step_series, rank)
        series = series[series["steady"].astype(bool) & (series["fetch_ns"] >= 0)]
        if not isinstance(workers, int) or cores is None or not (len(means) and len(fetches) and len(series)):
            raise NotMeasured("how long fetching a batch takes was not recorded")
        row, step = means.fillna({"taken_ns": 0.0, "delayed": 0.0}).iloc[0], _of(self.step_means, rank).iloc[0]
        batches, loaders = _batches(float(row["step_batches"]), int(row["loaders"]), bool(row["alike"]))
        if loaders > 1 and len({one.get("num_workers") for one in _training(self.job, rank)}) > 1:
            raise NotMeasured("the loaders that a step takes batches from have different numbers of workers")
        fetch, used, delay, collate = fetches[["dur_ns", "cpu_ns", "delay_ns", "collate_ns"]].to_numpy(dtype=float).T
        if on_cpu and not workers:
            # The kernel's counters are not read for fetches of a few milliseconds; these are assumed to compute.
            used = np.where(used < 0, fetch, used)
        if (used < 0).all() or np.isnan(row["cores"]):
            raise NotMeasured("what fetching and training use of the cores was not recorded")
        # From here on, all times are for one batch.
        step_ns, gap_ns = float(step["step_ns"]) / batches, float(fetches["gap_ns"].iloc[0])
        used = np.where(used < 0, used[used >= 0].mean(), used)
        tensors, size = (float(fetches[name].mean()) for name in ("tensors", "tensor_bytes"))
        # A worker also computes while it sends a batch, in a second thread.
        sending = handover_cost(tensors, size, np.nan).usual.sending_ns if on_cpu and workers else 0.0
        delay = np.minimum(np.maximum(delay, 0.0), np.maximum(fetch - np.maximum(used - sending, 0.0), 0.0))
        collate = np.clip(collate, 0.0, fetch)
        # Collating computes or waits for a core. It is assumed to have a core as often as the rest of the batch.
        collating, had = np.minimum(collate, used + delay), used / np.maximum(used + delay, 1.0)
        # Taking a ready batch is the loop's own work.
        waited_ns = (series["fetch_ns"] - batches * row["taken_ns"]).clip(lower=0)
        own = (series["dur_ns"] - waited_ns).to_numpy(dtype=float)
        waits = None if on_cpu else self.input_waits.or_none()
        if waits is not None and len(waits := _of(waits, rank)):
            # Without waits for data the host only launches, and runs ahead: the device limits the loop.
            own = np.maximum(own, batches * step_ns - (waits["wait_ns"] + waits["taken_ns"]).iloc[0])
        own = _between(own, batches, loaders)
        inside = 0.0 if workers else 1.0  # the share of fetching that the loop's own figures hold
        own_delay, own_used = (
            row["delayed"] * step_ns - inside * delay.mean(),
            row["cores"] * step_ns - inside * used.mean(),
        )
        threads = max(settings.threads(self.job, rank) or 1, 1) if on_cpu else 1
        # The kernel measures how long the training thread waited for a core; meanwhile the others spun.
        alone = min(max(1.0 - own_delay / own.mean(), 0.1), 1.0) ** (threads if threads <= cores else 1)
        # Taking batches lacked cores as often as the rest of the loop. On a GPU, the loop is ahead of its device, and
        # is not replayed without workers.
        taken = means["taken_ns"].iloc[0] * alone
        handover = handover_cost(tensors, size, taken) if on_cpu else NO_HANDOVER
        collates = (loader.get("collate") or {}).get("name") == "default_collate"
        recorded = LoopTimes(
            workers=workers,
            prefetch=int(loader.get("prefetch_factor") or 2),
            own=own * alone,
            own_cpu=min(max(own_used, 0.0) / threads / (own.mean() * alone), 1.0),
            threads=threads,
            fetch=fetch - delay + gap_ns,
            fetch_cpu=used,
            cores=cores,
            ranks=settings.neighbours(self.job, rank),
            others_cpu=_others_cpu(self.fetch_series, self.job, rank),
            collate=collate - collating * (1 - had),
            collate_cpu=collating * had,
            handover=handover,
            gap=gap_ns,
            barrier=BARRIER if on_cpu else 1.0,
            alone=alone,
            shared=shared(tensors, size) if workers and collates else 0.0,
            batches=batches,
            loaders=loaders,
            pin=0.0 if rank in self.pinning.lacking else float(_of(self.pinning.get(), rank)["pin_ns"].iloc[0]),
        )
        trained, waited = recorded.own.mean() * recorded.own_cpu, own.mean() * (1 - alone)
        stretch, longer = 1 + waited / max(trained, 1.0), 1 + delay.mean() / max(used.mean(), 1.0)
        _, overlap = replay(own, fetch + gap_ns, used, workers * loaders, recorded.prefetch, recorded.pin / loaders)
        busy = (trained + waited) / step_ns, recorded.batch_cpu * longer / step_ns
        model = stretches(recorded, workers * loaders, busy, own.mean() / step_ns, overlap)
        excess = stretch / model[0]
        # If the loop waited for a core for longer than its workers computed, other processes used it.
        foreign = max(waited - held_up(recorded) * recorded.ranks * recorded.batch_cpu, 0.0) if workers else waited
        alone = min(excess, 1 + foreign / max(trained, 1.0))
        return replace(recorded, excess=(excess, longer / model[1]), excess_alone=alone, stretch=stretch)


@across_ranks
def loop_times(
    loader_means: Frame = needs(loader_means),
    step_means: Frame = needs(step_means),
    fetch_series: Frame = needs(fetch_series),
    step_series: Frame = needs(step_series),
    input_waits: Maybe[Frame] = maybe(input_waits),
    pinning: Maybe[Frame] = maybe(pinning),
    job: Job = needs(JOB),
) -> AllLoopTimes:
    """Return the step and fetch times of all ranks."""
    return AllLoopTimes(loader_means, step_means, fetch_series, step_series, input_waits, pinning, job)


def _others_cpu(fetch_series: pd.DataFrame, job: Job, rank: int) -> float:
    """Return the mean CPU time of a batch on the other ranks of the host, ns; NaN: no such ranks, or unknown."""
    others = [r for r in job.ranks if r != rank and settings.host(job, r) == settings.host(job, rank)]
    known = fetch_series[fetch_series["rank"].isin(others) & (fetch_series["cpu_ns"] >= 0)]
    return float(known.groupby("rank")["cpu_ns"].mean().mean())


def _batches(of_a_step: float, loaders: int, alike: bool) -> tuple[int, int]:
    """Return how many batches a step takes, and from how many loaders in turn; raise NotMeasured where that varies."""
    whole = round(of_a_step)
    if whole < 1 or abs(of_a_step / whole - 1) >= _UNEVEN:
        raise NotMeasured(f"a step takes {digits(of_a_step)} batches in the mean: their number varies")
    if loaders > 1 and (not alike or whole % loaders):
        raise NotMeasured(f"the steps take different numbers of batches from {loaders} loaders")
    return whole, loaders


def _between(own: NDArray[np.float64], batches: int, loaders: int) -> NDArray[np.float64]:
    """Divide the loop's own work in each step: an equal part follows one batch of every loader."""
    after = np.zeros((len(own), batches))
    after[:, loaders - 1 :: loaders] = own[:, None] * loaders / batches
    return after.ravel()


def _training(job: Job, rank: int) -> list[settings.Settings]:
    return [one for one in job.facts[rank].get("loaders") or [] if one.get("role") == "train"]


def in_turn(fetches: pd.DataFrame) -> pd.DataFrame:
    """Sort fetches by the order in which their batches are taken: one of each worker in turn. Drop incomplete rounds.

    With several loaders: the first worker of each, then the second of each. If a worker has too few fetches, the order
    stays as it is.
    """
    by_worker = fetches.groupby(["loader", "worker"])
    turn, whole = by_worker.cumcount(), by_worker.size().min()
    if not whole >= _ENOUGH:
        return fetches
    return fetches.assign(turn=turn)[turn < whole].sort_values(["turn", "worker", "loader"], kind="stable")


def _of(frame: pd.DataFrame, rank: int) -> pd.DataFrame:
    return frame[frame["rank"] == rank]


class Plan(Struct, frozen=True):
    """What more workers would give: the worst rank's forecasts, the chosen forecast, and the gain of the run, ns.

    `sure`: the run also gains at the highest possible cost of workers.
    """

    forecasts: tuple[Forecast, ...]
    chosen: Forecast
    gain_ns: float
    sure: bool = True

    @property
    def now(self) -> Forecast:
        """The forecast with as many workers as there are."""
        return self.forecasts[0]

    @property
    def gains(self) -> dict[int, float]:
        """The run's gain with each number of workers, ns: in proportion to the worst rank's, which is replayed."""
        best = self.now.step_ns - self.chosen.step_ns
        of_it = self.gain_ns / best if best > 0 and self.gain_ns > 0 else 1.0
        return {f.workers: of_it * (self.now.step_ns - f.step_ns) for f in self.forecasts[1:]}


# So many samples have to come again to say that all are the same each time. To keep them pays where a sample takes so
# many times as long as to copy it at this rate and to find it, s, and where all take no more of the memory left.
_AGAIN, _WORTH, _COPIED_A_SECOND, _FOUND_S, _OF_MEMORY = 3, 10, 2e9, 20e-6, 0.5


class KeptSamples(Struct, frozen=True):
    """A data set whose samples are the same each time: how many, how many were seen again, and the bytes of all."""

    samples: int
    again: int
    size: float


@across_ranks
def kept_samples(
    starving: Starving = needs(starving),
    repeated_samples: Frame = needs(repeated_samples),
    worker_means: Frame = needs(worker_means),
    sample_means: Frame = needs(sample_means),
    job: Job = needs(JOB),
) -> KeptSamples:
    """Return what keeping the samples of the starving rank's loader takes; raise NotMeasured where it may not pay."""
    rank, length, batch = starving.rank, starving.loader.get("dataset_length"), starving.loader.get("batch_size")
    seen = repeated_samples[(repeated_samples["rank"] == rank) & (repeated_samples["of_samples"] == length)]
    seen = seen[(seen["again"] >= _AGAIN) & (seen["same"] == seen["again"])]
    if not len(seen) or not batch or not length:
        raise NotMeasured("it was not seen that each epoch has the same samples")
    again, size = int(seen["again"].iloc[0]), float(seen["bytes"].iloc[0])
    mine = worker_means[worker_means["rank"] == rank]
    took_s = float(np.average(mine["dur_ns"] - mine["collate_ns"], weights=mine["batches"])) / batch / 1e9
    left = sample_means[sample_means["metric"] == "memory_available_bytes"]["mean"].min()
    here = sum(settings.host(job, one) == settings.host(job, rank) for one in job.ranks)
    if took_s < _WORTH * (size / _COPIED_A_SECOND + _FOUND_S) or not here * size * length <= _OF_MEMORY * left:
        raise NotMeasured("to keep the samples would give little, or they do not fit into memory")
    return KeptSamples(length, again, size * length)


class FasterLoader(Struct, frozen=True):
    """What removes the wait, and the saving, ns a step: more workers, or cheaper batches if workers do not help.

    `saving_ns`: of the better one. `plan`: None where the batches were not recorded. `workers_help`: whether the plan's
    workers are the better one. `part`: the slowest part of making a batch, SAMPLES, COLLATING or PINNING. `line`: the
    line of the user's that takes most of making a batch, None: not known. `line_ns`: what is saved with this line gone,
    where that comes first, and `saving_ns` is then that of batches that cost nothing to make; 0: it does not. `kept`:
    the data set whose samples may be kept instead of made again.
    """

    saving_ns: float
    plan: Plan | None = None
    workers_help: bool = False
    part: str = SAMPLES
    line: CostlyLine | None = None
    line_ns: float = 0.0
    kept: KeptSamples | None = None

    @property
    def line_first(self) -> bool:
        """Whether the change of the line comes before more workers."""
        return self.line_ns > 0


# What a short rest of a step takes at least without a long fetch before it, as a share: caches stay warm then, and the
# recorder does less. 0.56 to 0.96 in six scripts of benchmarks/causes with steps of 1 to 5 ms then.
_COLD, _SHORT_NS = 0.55, 5e6

# How many times what more workers save a line must take, to come before them: where it is not known what it does; and
# where that is needless, so that workers would do the same for each sample again.
_UNKNOWN, _NEEDLESS = 1.25, 0.75


@across_ranks
def faster_loader(
    input_waits: Frame = needs(input_waits),
    input_cost_ns: float = needs(input_cost_ns),
    starving: Starving = needs(starving),
    mean_step_ns: float = needs(mean_step_ns),
    loop_times: Maybe[AllLoopTimes] = maybe(loop_times),
    own_time: Frame = needs(own_time),
    step_series: Frame = needs(step_series),
    fetch_gains: Maybe[Frame] = maybe(fetch_gains),
    breakdown: Frame = needs(breakdown),
    costly_lines: Maybe[Frame] = maybe(costly_lines),
    pauses_in_fetch: Maybe[Frame] = maybe(pauses_in_fetch),
    kept_samples: Maybe[KeptSamples] = maybe(kept_samples),
    statements: Trees = needs(statements),
    job: Job = needs(JOB),
) -> FasterLoader:
    """Predict the saving of more workers or of cheaper batches, whichever is better; the whole wait if not known.

    A line that is known to do needless work comes before workers that give no more. The prediction takes long, so it is
    made only where the wait is notable.
    """
    wait, recorded = by_rank(input_waits, "wait_ns"), loop_times.or_none()
    if input_cost_ns < NOTABLE_SHARE * mean_step_ns:
        return FasterLoader(input_cost_ns)
    line = costliest(costly_lines, starving.rank, "worker" if starving.workers else "fetch")
    if line is not None and line.callers:
        # The steps of a chain of generators: the one that asks for what this line makes may drop it.
        after = filtered_after(statements, line.place.function, line.callers[0].function)
        if after:
            line = replace(line, callers=after[:1], idiom=idioms.BY_NAME[idioms.FILTERED])
    plan = None if recorded is None else planned(recorded, own_time, fetch_gains, wait)
    if recorded is None or plan is None:
        return FasterLoader(input_cost_ns, line=line)
    times = recorded.of(starving.rank)
    costly = times.costly
    on_cpu = settings.on_cpu(job)

    def saved_by(cheaper: Callable[[LoopTimes], LoopTimes]) -> float:
        """Return what is saved if making batches costs less, ns a step.

        With a GPU only the wait changes: what the host computes while the GPU is busy costs no time. Ranks without
        recorded batches are assumed to be like this one.
        """
        if on_cpu:
            with suppress(NotMeasured):
                return mean_step_ns - step_with(recorded, own_time, cheaper)
        freed = _freed_by(times, cheaper(times))
        return saving_input(step_series, own_time, {r: gained(fetch_gains, r, ns, freed) for r, ns in wait.items()})

    cheaper = saved_by(lambda times: times.without(costly))
    if costly == PINNING and not on_cpu:  # the copies to the device go too, until the workers limit the step
        fed = replayed(replace(times.without(PINNING), own=np.ones(1)), times.workers).step_ns
        copied = part(breakdown, "copy").get(starving.rank, 0.0)
        cheaper += min(copied, max(mean_step_ns - cheaper - fed, 0.0))
    gain = max(cheaper, plan.gain_ns)
    helps = plan.sure and plan.gain_ns >= max(NOTABLE_SHARE * mean_step_ns, LARGER_PART * gain)
    if line is not None and costly != PINNING:
        share = line.share
        known = line.idiom is not None and line.idiom.first and line.idiom.name != idioms.LOOPS
        kept = kept_samples.or_none() if costly == SAMPLES and not known else None
        line_ns = saved_by(lambda times: times.cheaper(1.0 - share)) if kept is None else cheaper
        least = plan.gain_ns * (_UNKNOWN if line.idiom is None and kept is None else _NEEDLESS)
        needless = line.idiom is None or known or kept is not None
        if line_ns >= max(NOTABLE_SHARE * mean_step_ns, least) and (needless or not helps):
            # The training thread makes the batches, and the objects of their samples are what it collects.
            pauses = 0.0 if starving.workers else by_rank(pauses_in_fetch.get(), "ns")[starving.rank]
            everything = saved_by(lambda times: times.cheaper(0.0))
            most = _bound(max(everything, gain) + pauses, mean_step_ns, job)
            return FasterLoader(most, plan, False, costly, line, line_ns, kept)
    return FasterLoader(plan.gain_ns if helps else _bound(gain, mean_step_ns, job), plan, helps, costly, line)


def _bound(saving_ns: float, step_ns: float, job: Job) -> float:
    """Return the most that is saved where the rest of the step, on the same CPU, comes after less of other work."""
    left = step_ns - saving_ns
    short = settings.on_cpu(job) and left < min(saving_ns, _SHORT_NS)
    return step_ns - _COLD * left if short else saving_ns


def trusted(loop_times: AllLoopTimes, rank: int) -> Forecast:
    """Return the replay of a rank with its own settings.

    Raises NotMeasured if it differs by more than TRUSTED from the measured step, and as `AllLoopTimes.of` does.
    """
    recorded, measured = loop_times.of(rank), loop_times.step_ns(rank)
    now = replayed(recorded, recorded.workers)
    if abs(now.step_ns - measured) > TRUSTED * measured:
        raise NotMeasured(f"the recorded batches explain a step of {now.step_ns / 1e6:.1f} ms only")
    return now


def forecasts(loop_times: AllLoopTimes, rank: int) -> tuple[Forecast, ...]:
    """Return the mean step of a rank as it is, then with 1, 2, … workers, while more may still help.

    On a CPU also without workers. All are corrected by the difference between the replay and the measured step. Raises
    NotMeasured as `trusted` does.
    """
    recorded, now = loop_times.of(rank), trusted(loop_times, rank)
    corrected = correction(loop_times, rank, now)
    given = [now]
    if recorded.workers and settings.on_cpu(loop_times.job):
        given.append(replayed(recorded, 0))
    best, since = np.inf, 0
    for n in range(1, max(MOST_WORKERS, int(2 * recorded.cores / recorded.ranks), recorded.workers) + 1):
        given.append(replayed(recorded, n))
        since = 0 if given[-1].step_ns < best * (1 - WORTH) else since + 1
        best = min(best, given[-1].step_ns)
        # A third worker may gain what two did not, as batches divide unevenly. Stop after three without a gain.
        if n > recorded.workers and since >= 3:
            break
    return tuple(map(corrected, given))


def correction(loop_times: AllLoopTimes, rank: int, now: Forecast) -> Callable[[Forecast], Forecast]:
    """Return a function that corrects a rank's forecasts by the error of the replay `now` of its own settings."""
    recorded = loop_times.of(rank)
    # A wait that the replay does not explain was a wait for workers. Without workers it is gone.
    waited = loop_times.step_ns(rank) - recorded.batches * float(recorded.own.mean()) / recorded.alone
    queue = max(waited - now.wait_ns, 0.0)
    # The rest of the error is in proportion to the step.
    off = (loop_times.step_ns(rank) - queue) / now.step_ns
    return lambda f: replace(f, step_ns=float(f.step_ns * off + (queue if f.workers else 0.0)))


def proposed(given: tuple[Forecast, ...]) -> Forecast:
    """Return the fewest workers within WORTH of the best step, not fewer than now; `given` begins with the present."""
    more = [f for f in given if f.workers >= given[0].workers]
    best = min(f.step_ns for f in more)
    return min((f for f in more if f.step_ns <= best * (1 + WORTH)), key=lambda f: f.workers)


def planned(
    loop_times: AllLoopTimes, own_time: pd.DataFrame, fetch_gains: Maybe[pd.DataFrame], wait: Mapping[int, float]
) -> Plan | None:
    """Choose the number of workers for the rank that waits most, and predict what all ranks gain with it.

    `wait`: each rank's exposed wait for data in the mean steady step, ns. None where the batches were not recorded.
    """
    most, *others = sorted((r for r in wait if wait[r]), key=lambda r: -wait[r])[:MOST_RANKS]
    try:
        given = forecasts(loop_times, most)
        chosen = proposed(given)
        freed = {r: _freed(trusted(loop_times, r), replayed(loop_times.of(r), chosen.workers)) for r in others}
        dear = loop_times.of(most).where_workers_cost_most
        slower = replayed(dear, chosen.workers).step_ns >= replayed(dear, dear.workers).step_ns
        disturbed = dear.excess_alone > DISTURBED
    except NotMeasured:
        return None
    # The ranks that were not replayed wait less. They are assumed to gain the same share as the worst.
    like = _freed(given[0], chosen)
    gone = {r: gained(fetch_gains, r, ns, freed.get(r, like)) for r, ns in wait.items()}
    return Plan(given, chosen, saving_input(loop_times.step_series, own_time, gone), not (slower or disturbed))


def step_with(loop_times: AllLoopTimes, own_time: pd.DataFrame, cheaper: Callable[[LoopTimes], LoopTimes]) -> float:
    """Return the mean step on a CPU if making batches cost less, ns; raises as `AllLoopTimes.of` does.

    Ranks compute the same, on the cores that fetching leaves free. A rank's time without computing is transfer, equal
    on all ranks, or waiting for ranks with fewer cores. The least such time of any rank is kept.
    """
    waits = by_rank(own_time, "wait_ns")
    recorded = {rank: loop_times.of(rank) for rank in loop_times.job.ranks}
    stays = min(max(float(p.own.mean()) * (1 - p.own_cpu) - waits[r] / p.batches, 0.0) for r, p in recorded.items())

    def bare(times: LoopTimes) -> LoopTimes:
        computes = float(times.own.mean()) * times.own_cpu
        own = max(computes + stays, 1.0)
        return replace(cheaper(times), own=np.array([own]), own_cpu=computes / own)

    def least(changed: LoopTimes) -> float:
        own, fetch, workers = float(changed.own[0]), float(changed.fetch.mean()), changed.workers * changed.loaders
        return changed.batches * (max(own, fetch / workers) if workers else own + fetch)

    slowest = sorted((bare(p) for p in recorded.values()), key=least)[-MOST_RANKS:]
    return max(replayed(changed, changed.workers).step_ns for changed in slowest)


def freed_by_equal_workers(loop_times: AllLoopTimes, rank: int, slow: int) -> float:
    """Return the share of a rank's wait that disappears if the worker `slow` fetches as fast as the others."""
    recorded, by = loop_times.of(rank), loop_times.workers_in_turn(rank)
    # Replace each fetch of the slow worker by one of the others', in their order.
    place = np.arange(len(by))
    place[by == slow] = np.resize(np.flatnonzero(by != slow), np.count_nonzero(by == slow))
    return _freed_by(recorded, replace(recorded, fetch=recorded.fetch[place], fetch_cpu=recorded.fetch_cpu[place]))


def _freed_by(recorded: LoopTimes, changed: LoopTimes) -> float:
    return _freed(replayed(recorded, recorded.workers), replayed(changed, changed.workers))


def _freed(now: Forecast, then: Forecast) -> float:
    """Return the share of the wait that is gone, less what computing is slower by."""
    return min(max((now.step_ns - then.step_ns) / now.wait_ns, 0.0), 1.0) if now.wait_ns else 0.0


class FewerWorkers(Struct, frozen=True):
    """The steps of the rank that gains least with fewer workers, and each rank's gain with its best number, ns.

    `least_ns`: the gain at the lowest cost of workers that the recording allows.
    """

    rank: int
    forecasts: tuple[Forecast, ...]  # as it is, then with fewer workers
    chosen: Forecast
    least_ns: float
    by_rank_ns: Mapping[int, float]

    @property
    def gain_ns(self) -> float:
        """How much shorter the step is with the chosen workers."""
        return max(self.forecasts[0].step_ns - self.chosen.step_ns, 0.0)


@across_ranks
def fewer_workers(
    loader_calls: Frame = needs(loader_calls),
    loop_times: Maybe[AllLoopTimes] = maybe(loop_times),
    job: Job = needs(JOB),
) -> FewerWorkers:
    """Predict the step with fewer workers than there are.

    Raises DoesNotApply where there are none, or training is on a device; NotMeasured where no loader was seen, its
    batches were not recorded, or do not explain the step.
    """
    if not loader_calls["calls"].any():
        raise NotMeasured("no DataLoader was seen")
    workers = {r: settings.training_loader(job, r).get("num_workers") for r in job.ranks}
    if not settings.on_cpu(job) or not any(workers.values()):
        raise DoesNotApply("training is on a device, or its loader has no workers")
    recorded, found = loop_times.get(), []
    slowest = sorted((r for r in job.ranks if workers[r]), key=lambda r: -recorded.step_ns(r))[:MOST_RANKS]
    for rank in slowest:
        given = forecasts(recorded, rank)
        fewer = [f for f in given[1:] if f.workers < given[0].workers]
        best = min(f.step_ns for f in fewer)
        chosen = min((f for f in fewer if f.step_ns <= best * (1 + WORTH)), key=lambda f: f.workers)
        found.append((rank, given[0], fewer, chosen))
    # All ranks wait for the one that gains least.
    rank, now, fewer, chosen = min(found, key=lambda one: one[1].step_ns - one[3].step_ns)
    cheap = recorded.of(rank).where_workers_cost_least
    least = now.step_ns - replayed(cheap, chosen.workers).step_ns
    return FewerWorkers(
        rank, (now, *fewer), chosen, least, {r: max(a.step_ns - b.step_ns, 0.0) for r, a, _, b in found}
    )


# Storages of at least so many times a batch's bytes, and so many more bytes, are worth a copy of the part that is used.
_TIMES_AS_MUCH, _MORE_BYTES = 4, 1_000_000


class CopiedStorages(Struct, frozen=True):
    """A rank whose workers send parts of larger storages, each of which they copy whole, and what less copying saves.

    `gain_ns`: of the mean step; `least_ns`: where workers cost training as little as the recording allows. `of_cores`:
    the gain is training's on a CPU, which has the cores then, and most of what it would have without workers; else it
    is of the wait for data alone.
    """

    rank: int
    held_bytes: float  # of a batch's tensors
    copied_bytes: float  # of their storages
    gain_ns: float
    least_ns: float
    of_cores: bool
    parts: tuple[Place, ...]  # where the data set takes them, if that is known

    @property
    def remedy(self) -> str:
        """What to change."""
        carried = f"a batch of {size(self.held_bytes)} carries {size(self.copied_bytes)} of storages from its worker"
        takes = "copy what a sample takes out of a larger tensor with `.clone()`"
        return f"{takes} (in `__getitem__`), or stack in the collate function: {carried}"

    @property
    def found(self) -> str:
        """What was found, as a sentence."""
        return (
            f"To send a batch of {size(self.held_bytes)}, a worker copies {size(self.copied_bytes)}: the whole storages"
            " that its tensors are parts of."
        )


@across_ranks
def copied_storages(
    fetch_series: Frame = needs(fetch_series),
    loader_means: Frame = needs(loader_means),
    input_cost_ns: float = needs(input_cost_ns),
    loop_times: Maybe[AllLoopTimes] = maybe(loop_times),
    fewer_workers: Maybe[FewerWorkers] = maybe(fewer_workers),
    statements: Trees = needs(statements),
    job: Job = needs(JOB),
) -> CopiedStorages:
    """Return the rank that gains least without such copies, as all wait for it: its batches then copy what they hold.

    On a CPU the recorded batches are replayed without what they compute to copy more. Elsewhere, and where they do not
    explain the step, the loop waits less by the time of that copying at most. Raises NotMeasured where batches were not
    looked at, DoesNotApply where no workers, or not all ranks', copy more, or it takes less than half of what workers
    cost otherwise.
    """
    looked_at = fetch_series[(fetch_series["worker"] >= 0) & (fetch_series["copied_bytes"] >= 0)]
    if not len(looked_at):
        raise NotMeasured("what workers copy to send a batch was not recorded")
    found = []
    for rank in job.ranks:
        mine, loader = _of(looked_at, rank), settings.training_loader(job, rank)
        held, copied = float(mine["tensor_bytes"].mean()), float(mine["copied_bytes"].mean())
        if not copied >= max(_TIMES_AS_MUCH * held, held + _MORE_BYTES):
            raise DoesNotApply("workers copy no more than batches hold to send them")
        extra = _copying_ns(mine, held, copied)
        if (fewer := fewer_workers.or_none()) is not None:
            gain, least = _without_copying(loop_times.get(), rank, extra)
            if gain <= 0 or gain < LARGER_PART * fewer.gain_ns:
                raise DoesNotApply("workers cost more than they copy")
        else:
            each = extra * float(_of(loader_means, rank)["step_batches"].iloc[0])
            gain = least = min(each / max(int(loader.get("num_workers") or 1), 1), input_cost_ns)
        parts = parts_taken(statements, str(loader.get("dataset")), (loader.get("collate") or {}).get("name") or "")
        found.append(CopiedStorages(rank, held, copied, gain, max(least, 0.0), fewer is not None, parts))
    return min(found, key=lambda one: one.gain_ns)


def _copying_ns(fetches: pd.DataFrame, held: float, copied: float) -> float:
    """Return what a worker computes to copy more of a batch than it holds: by the bytes, between what is known.

    It is no more than all that the worker computes, and no less than its share of what no fetch can have computed.
    """
    usual = (
        handover_cost(0.0, copied - held, np.nan).usual.sending_ns - handover_cost(0.0, 0.0, np.nan).usual.sending_ns
    )
    cpu, took = (float(fetches[name].mean()) for name in ("cpu_ns", "dur_ns"))
    if not (fetches["cpu_ns"] >= 0).all():
        return usual
    return min(max(usual, (cpu - took) * (1 - held / copied)), cpu)


def _without_copying(loop_times: AllLoopTimes, rank: int, extra_ns: float) -> tuple[float, float]:
    """Return what a rank's step on a CPU gains if each batch costs its worker less; and where workers cost least."""
    now, recorded = trusted(loop_times, rank), loop_times.of(rank)
    corrected, steps = correction(loop_times, rank, now), []
    for times in (recorded, recorded.where_workers_cost_least):
        cpu = np.maximum(times.fetch_cpu - extra_ns, 0.0)
        others = max(times.others_cpu - extra_ns, 0.0)
        # What the replay does not explain was waiting for the copies, or for cores and memory that they used.
        excess = times.excess[0] if np.isnan(times.excess_alone) else times.excess_alone
        changed = replace(times, fetch_cpu=cpu, others_cpu=others, excess=(excess, times.excess[1]))
        then = replayed(changed, times.workers)
        steps.append(corrected(replace(then, workers=0)).step_ns)
    return corrected(now).step_ns - steps[0], corrected(now).step_ns - steps[1]
