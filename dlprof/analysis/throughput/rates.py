"""Samples and tokens of a step: what each rank counted, and what that is of the whole job.

A rank counts what its loaders give, or what its model gets, unless the script says it. Ranks of a data-parallel job
train on batches of their own; those that cut up layers or stages between them work on the same ones. Which of these a
job is shows in how its samplers share out the data, in its pipeline's ranks and in how its model is wrapped.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.engine import JOB, RANK, Frame, Job, Maybe, RankFacts, across_ranks, maybe, needs, per_rank
from dlprof.analysis.machine.samples import sample_means
from dlprof.analysis.step.whole_job import loop_step_ns
from dlprof.analysis.timeline.steady import steady_steps
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.errors import NotMeasured
from dlprof.result.throughput import Throughput

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
    told = bool((rank.facts.get("step") or {}).get("told"))
    samples, source = _mean(steps["samples"]), SCRIPT if told else LOADER
    if math.isnan(samples) and not _has_several(rank):
        # Of a pipeline every call of every stage counts.
        stages = len((rank.facts.get("pipeline") or {}).get("stages") or (0,))
        samples, source = _mean(steps["inputs"]) / stages, MODEL
        if any(m.get("batch_first") is False for m in rank.facts.get("models") or []):
            samples = math.nan  # its first dimension may be the sequence's
    tokens = _mean(steps["tokens"])
    if not told and not any(m.get("reads_sequences") for m in rank.facts.get("models") or []):
        tokens = math.nan  # integers as features, and no text
    if math.isnan(samples) and math.isnan(tokens):
        raise NotMeasured(NOT_COUNTED)
    return pd.DataFrame({"samples": [samples], "tokens": [tokens], "source": [source]})


def _mean(counts: pd.Series[int]) -> float:
    """Return the mean of the steps' counts, NaN where a step has none."""
    return float(counts.mean()) if (counts > 0).all() else math.nan


def _has_several(rank: RankFacts) -> bool:
    """Return whether a rank trains several models: what each of them gets is not known to be samples."""
    return len(rank.facts.get("optimizers") or []) > 1


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
    if job.apart or any(m.get("fsdp") or m.get("ddp") or m.get("class") in _ENGINES for m in models):
        return Share(world)
    return Share(0, "whether the ranks train on the same batches was not recorded")


# What wraps a model that each rank feeds with batches of its own.
_ENGINES = ("DeepSpeedEngine",)


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
    gpus = _gpus(job)
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


def _gpus(job: Job) -> int | None:
    """Return how many GPUs the job trains on; None: on none, or their number is not known."""
    several = any(m.get("data_parallel") for r in job.ranks for m in job.facts[r].get("models") or [])
    return job.world_size if settings.on_gpu(job) and not several else None


def _power(means: pd.DataFrame | None, gpus: int | None, job: Job) -> float | None:
    """Return the mean power of all GPUs of the job, in W; of ranks without readings, that of the others."""
    if means is None or gpus is None:
        return None
    for metric in ("mean_power_w", "power_w"):
        mine = means[(means["source"] == "gpu") & (means["metric"] == metric)]
        if len(mine):
            return float(mine.groupby("rank")["mean"].mean().mean()) * job.world_size
    return None
