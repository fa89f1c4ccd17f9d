"""Samples and tokens of a step: what each rank counted, what that is of the whole job, and how the job scales.

A rank counts what its loaders give, or what its model gets, unless the script says it. Ranks of a data-parallel job
train on batches of their own; those that cut up layers or stages between them work on the same ones. Which of these a
job is shows in how its samplers share out the data, in its pipeline's ranks and in how its model is wrapped.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import settings
from dlprof.analysis.communication.bandwidth import transfers
from dlprof.analysis.communication.collectives import NOBODY, window_steps
from dlprof.analysis.communication.exchange_plans import exposed_transfer
from dlprof.analysis.engine import JOB, RANK, Frame, Job, Maybe, RankFacts, across_ranks, maybe, needs, per_rank
from dlprof.analysis.machine.samples import sample_means
from dlprof.analysis.step.savings import own_time
from dlprof.analysis.step.whole_job import loop_step_ns
from dlprof.analysis.stragglers.own_time import own_steps
from dlprof.analysis.timeline.steady import steady_steps
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.result import Fact
from dlprof.result.figures import Cost, Throughput
from dlprof.result.scale import Scaling, Transfers
from dlprof.units import digits, duration, quantity

# What wrote a step's samples down first.
SCRIPT, LOADER, MODEL = "script", "loader", "model"

NOT_COUNTED = (
    "neither the loaders' batches nor the model's input show how many samples a step has: call"
    " dlprof.step(samples=...) in the script"
)


@per_rank
def work_done(steady_steps: Frame = needs(steady_steps), rank: RankFacts = needs(RANK)) -> pd.DataFrame:
    """Return one row: samples, tokens (of the mean steady step; NaN: not known), source (script, loader, model).

    The loaders count where each steady step took a batch that could be counted, else the model's input does, if its
    first dimension is known to be that of the samples. Raises NotMeasured without a step log, and where nothing counts.
    """
    steps = steady_steps
    if not len(steps):
        raise NotMeasured("no steady training step was recorded")
    from_script = bool((rank.facts.get("step") or {}).get("told"))
    samples, source = _mean(steps["samples"]), SCRIPT if from_script else LOADER
    # What each of several models gets is not known to be samples.
    if math.isnan(samples) and len(rank.facts.get("optimizers") or []) <= 1:
        # In a pipeline every call of every stage counts.
        stages = len((rank.facts.get("pipeline") or {}).get("stages") or (0,))
        samples, source = _mean(steps["inputs"]) / stages, MODEL
        if any(m.get("batch_first") is False for m in rank.facts.get("models") or []):
            samples = math.nan  # its first dimension may be the sequence's
    tokens = _mean(steps["tokens"])
    if not from_script and not any(m.get("reads_sequences") for m in rank.facts.get("models") or []):
        tokens = math.nan  # integers as features, and no text
    if math.isnan(samples) and math.isnan(tokens):
        raise NotMeasured(NOT_COUNTED)
    return pd.DataFrame({"samples": [samples], "tokens": [tokens], "source": [source]})


def _mean(counts: pd.Series[int]) -> float:
    """Return the mean of the steps' counts, NaN where a step has none."""
    return float(counts.mean()) if (counts > 0).all() else math.nan


class Share(NamedTuple):
    """How many times the mean rank's work the whole job's is; 0: not known, and why."""

    times: float
    why: str = ""


def share(job: Job) -> Share:
    """Return how many ranks of a job train on batches of their own, by how its samplers and its model are set up."""
    world = job.world_size
    if world == 1:
        return Share(1)
    loaders = [settings.training_loader(job, r) for r in job.ranks]
    shares = [x.get("replicas") for x in loaders if isinstance(x.get("replica"), int)]
    found = {of for of in shares if isinstance(of, int) and of > 0}
    if len(shares) == len(loaders) and found:
        return Share(found.pop()) if len(found) == 1 else Share(0, "the ranks' samplers share out the data differently")
    pipes = {tuple(p.get("ranks") or ()) for r in job.ranks if (p := job.facts[r].get("pipeline"))}
    if pipes:
        stages = {len(pipe) for pipe in pipes}
        # Copies of a pipeline train on batches of their own: else they would be of no use.
        return Share(world / stages.pop()) if len(stages) == 1 and 0 not in stages else Share(0, "pipelines differ")
    models = [m for r in job.ranks for m in job.facts[r].get("models") or []]
    cut = max((m.get("tensor_parallel") or 1 for m in models), default=1)
    if cut > 1:
        return Share(world / cut) if world % cut == 0 else Share(0, "layers are cut up over some of the ranks")
    if job.apart or any(m.get("fsdp") or m.get("ddp") or m.get("class") == "DeepSpeedEngine" for m in models):
        return Share(world)
    return Share(0, "whether the ranks train on the same batches was not recorded")


@across_ranks
def throughput(
    work_done: Frame = needs(work_done),
    mean_step_ns: float = needs(mean_step_ns),
    loop_step_ns: Maybe[float] = maybe(loop_step_ns),
    sample_means: Maybe[Frame] = maybe(sample_means),
    job: Job = needs(JOB),
) -> Throughput:
    """Return the job's throughput; raises NotMeasured where neither samples nor tokens are known."""
    ranks = share(job)
    samples, tokens = (_known(work_done[name]) for name in ("samples", "tokens"))
    times, second = ranks.times or 1.0, mean_step_ns / 1e9
    epoch_samples, epoch_steps = _epoch(job, samples)
    step_s = (loop_step_ns.or_none() or mean_step_ns) / 1e9
    several = any(m.get("data_parallel") for r in job.ranks for m in job.facts[r].get("models") or [])
    gpus = job.world_size if settings.on_gpu(job) and not several else None
    return Throughput(
        samples_per_s=_times(samples, times / second),
        tokens_per_s=_times(tokens, times / second),
        samples_per_step=_times(samples, times),
        tokens_per_step=_times(tokens, times),
        source=work_done["source"].iloc[0],
        of="job" if ranks.times else "rank",
        why=ranks.why,
        gpus=gpus if ranks.times else None,
        power_w=_power(sample_means.or_none(), gpus, job) if ranks.times else None,
        epoch_samples=epoch_samples,
        epoch_s=_times(epoch_steps, step_s),
    )


def _known(counts: pd.Series[float]) -> float | None:
    """Return the mean of the ranks that counted: of a pipeline, those that have a loader or get tokens."""
    return None if counts.isna().all() else float(counts.mean())


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _epoch(job: Job, samples: float | None) -> tuple[int | None, float | None]:
    """Return what the training set holds, and the steps in which each rank goes over its share of it."""
    loader = settings.training_loader(job)
    length = loader.get("dataset_length")
    if not isinstance(length, int) or loader.get("iterable") or not samples:
        return None, None
    return length, length / ((loader.get("replicas") or 1) * samples)


def _power(means: pd.DataFrame | None, gpus: int | None, job: Job) -> float | None:
    """Return the mean power of all GPUs of the job, in W; of ranks without readings, that of the others."""
    if means is None or gpus is None:
        return None
    for metric in ("mean_power_w", "power_w"):
        mine = means[(means["source"] == "gpu") & (means["metric"] == metric)]
        if len(mine):
            return float(mine.groupby("rank")["mean"].mean().mean()) * job.world_size
    return None


SECTION = "Throughput"

_COUNTED_BY = {
    "script": "dlprof.step() in the script",
    "loader": "the loaders' batches",
    "model": "the first dimension of the model's input",
}


def of_throughput(throughput: Maybe[Throughput] = maybe(throughput)) -> list[Fact]:
    """List a job's throughput; of a job without one, why."""
    t = throughput.or_none()
    if t is None:
        return [] if throughput.broke else [Fact(SECTION, "not known", throughput.why())]
    of = " of a rank" if t.of == "rank" else ""
    rows = [
        (f"samples a second{of}", _number(t.samples_per_s)),
        (f"samples a step{of}", _number(t.samples_per_step)),
        (f"tokens a second{of}", _number(t.tokens_per_s)),
        (f"tokens a step{of}", _number(t.tokens_per_step)),
        ("of the job", f"not known: {t.why}" if t.why else ""),
        ("counted by", _COUNTED_BY[t.source]),
    ]
    if t.gpus and t.gpus > 1:
        rows += [
            ("samples a second and GPU", _number(t.samples_per_s and t.samples_per_s / t.gpus)),
            ("tokens a second and GPU", _number(t.tokens_per_s and t.tokens_per_s / t.gpus)),
        ]
    if t.power_w:
        rows += [
            ("energy of a sample", _joules(t.of_samples(1))),
            ("energy of a token", _joules(t.of_tokens(1))),
        ]
    if t.of == "job":
        held = f" ({t.epoch_samples:,} samples)" if t.epoch_samples else ""
        rows += [
            (f"an epoch{held}", described(t.epoch)),
            ("a million samples", described(t.of_samples(1e6))),
            ("a billion tokens", described(t.of_tokens(1e9))),
        ]
    return [Fact(SECTION, name, value) for name, value in rows if value]


def _joules(cost: Cost | None) -> str:
    return "" if cost is None or cost.joules is None else energy(cost.joules)


def _number(value: float | None) -> str:
    return "" if value is None else digits(value)


def described(cost: Cost | None) -> str:
    """Write what a piece of training takes: "2.31 h, 9.24 GPU-hours, 21.4 MJ"; "" of None."""
    if cost is None:
        return ""
    parts = [time_taken(cost.seconds)]
    parts += [f"{digits(cost.gpu_hours)} GPU-hours"] if cost.gpu_hours is not None else []
    parts += [energy(cost.joules)] if cost.joules is not None else []
    return ", ".join(parts)


def time_taken(seconds: float) -> str:
    """Write a time of any length: "81.2 ms", "45.0 s", "12.5 min", "2.31 h", "3.10 days"."""
    for least, unit in ((2 * 86_400, 86_400), (5_400, 3_600), (120, 60)):
        if seconds >= least:
            return f"{digits(seconds / unit)} {({86_400: 'days', 3_600: 'h', 60: 'min'})[unit]}"
    return duration(1e9 * seconds)


def energy(joules: float) -> str:
    """Write an energy as people pay for it: "21.4 kJ", "3.20 kWh"."""
    return f"{digits(joules / 3.6e6)} kWh" if joules >= 3.6e5 else quantity(joules, "J")


# Quantiles of the ranks' own times that are kept. The largest is the mean of the top 1/64.
QUANTILES = 64

# Sizes that differ by less count as one: a quarter of a power of two.
_PER_OCTAVE = 4

# Kinds of collectives, groups and sizes that are kept: those that take longest.
MOST_TRANSFERS = 64


@across_ranks
def scaling(
    transfers: Maybe[Frame] = maybe(transfers),
    window_steps: Maybe[Frame] = maybe(window_steps),
    exposed_transfer: Maybe[pd.Series[float]] = maybe(exposed_transfer),
    own_time: Maybe[Frame] = maybe(own_time),
    own_steps: Maybe[Frame] = maybe(own_steps),
    job: Job = needs(JOB),
) -> Scaling:
    """Return what tells how a job of several ranks scales; raise DoesNotApply of one rank."""
    if job.world_size < 2:
        raise DoesNotApply("one rank")
    frame, exposed, own = transfers.or_none(), exposed_transfer.or_none(), own_time.or_none()
    known = own is not None and bool(own["known"].all())
    uneven, late = _lateness(own_steps.or_none()) if known else ((), ())
    return Scaling(
        transfers=() if frame is None else _transfers(frame, window_steps.get(), job),
        transfer_ns=None if exposed is None or not len(exposed) else float(exposed.mean()),
        wait_ns=float(own["wait_ns"].mean()) if own is not None and known else None,
        uneven_ns=uneven,
        late_ns=late,
    )


def _transfers(frame: pd.DataFrame, window_steps: pd.DataFrame, job: Job) -> tuple[Transfers, ...]:
    """Sum up the collectives of the traced steps by kind, ranks, hosts and size; the longest in total first."""
    steps = max(int(window_steps.groupby("rank").size().max()), 1)
    sized = frame["bytes"] > 0
    octave = np.full(len(frame), -1)
    octave[sized] = np.round(np.log2(frame["bytes"][sized]) * _PER_OCTAVE)
    hosts = {members: _hosts(job, str(members)) for members in frame["members"].unique()}
    by = frame.assign(octave=octave, hosts=frame["members"].map(hosts), n=1.0)
    sums = by.groupby(["collective", "ranks", "hosts", "octave"])[["n", "transfer_ns", "bytes"]].sum().reset_index()
    sums = sums[sums["ranks"] > 1].sort_values("transfer_ns", ascending=False).head(MOST_TRANSFERS)
    return tuple(
        Transfers(
            collective=str(row["collective"]),
            ranks=int(row["ranks"]),
            hosts=int(row["hosts"]),
            # Each of the group's ranks has it.
            count=row["n"] / steps * row["ranks"] / job.world_size,
            transfer_ns=row["transfer_ns"] / row["n"],
            bytes=row["bytes"] / row["n"] if row["octave"] >= 0 else None,
        )
        for row in sums.to_dict("records")
    )


def _hosts(job: Job, members: str) -> int:
    """Return on how many hosts a group lies; 0 where it is not known."""
    if members == NOBODY:
        return 0
    ranks = job.ranks if members == "" else [int(r) for r in members.split(",")]
    return len({settings.host(job, r) for r in ranks if r in job.facts})


def _lateness(own_steps: pd.DataFrame | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return how far the ranks' mean own times are apart, and single steps from what their rank usually takes, ns.

    Where few steps are known, ranks differ in their means by chance alone: that part is taken off.
    """
    if own_steps is None or not len(own_steps):
        return (), ()
    each = own_steps.pivot_table(index="step", columns="rank", values="own_ns").dropna()
    steps, ranks = each.shape
    if ranks < 2 or not steps:
        return (), ()
    # The mean of n values is itself uncertain: deviations from it are too small by √((n − 1) ÷ n).
    away = each.sub(each.mean(axis=1), axis=0).to_numpy() * math.sqrt(ranks / (ranks - 1))
    means = away.mean(axis=0)
    single = (away - means) * math.sqrt(steps / (steps - 1)) if steps > 1 else np.zeros_like(away)
    chance, seen = float(single.var()) / steps, float(means.var())
    means *= math.sqrt(max(1 - chance / seen, 0.0)) if seen > 0 else 0.0
    return _quantiles(means), _quantiles(single.ravel())


def _quantiles(values: NDArray[np.float64]) -> tuple[float, ...]:
    pieces = np.array_split(np.sort(values), min(QUANTILES, len(values)))
    return tuple(float(piece.mean()) for piece in pieces)
