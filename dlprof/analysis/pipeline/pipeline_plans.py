"""What a pipeline's step would be with more micro-batches, more stages a rank, another schedule, or even stages.

Every plan is the grid of a schedule, replayed with this run's own chunk times. What such a replay lacks of the measured
step is laid upon handing over, for which every plan pays as often as it does it; what is then still between the replay
"as it is" and the measured step, all are scaled by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import intervals as iv
from dlprof.analysis import settings
from dlprof.analysis.engine import Job, Maybe, across_ranks, by_rank, per_rank
from dlprof.analysis.pipeline.bubbles import backward_ns
from dlprof.analysis.pipeline.pipeline import Pipe
from dlprof.analysis.pipeline.schedules import (
    INTERLEAVED,
    LOOPED,
    SCHEDULES,
    SINGLE,
    SPLIT,
    V_SHAPED,
    Action,
    grid,
    replay,
    runs,
)
from dlprof.analysis.step.breakdown import part
from dlprof.analysis.timeline import device, host
from dlprof.analysis.timeline.idle import LATENCY_NS
from dlprof.analysis.timeline.steps import Timing
from dlprof.errors import NotMeasured

# What a send between GPUs is taken to need before its bytes move, however few: a choice, rather too much than too
# little.
SEND_START_NS = 50_000

# What a plan takes for granted, for the findings that are made of them.
ASSUMED = (
    "half a stage takes half as long, and so does computing a micro-batch of half the size; the Python within it, or"
    " the least that a kernel takes, launching, and handing over on a CPU take as long as now; between devices half as"
    " much is handed over in half the time; the halves of a backward pass are alike where they were not"
    " measured"
)


@dataclass(frozen=True)
class _Plan:
    """One thing to change. `easy`: it is one line of the script."""

    change: str
    schedule: str
    microbatches: int
    chunks: int
    easy: bool
    even: bool = False


@per_rank
def host_in_chunks(partition: dict[str, iv.Intervals], chunk_times: Maybe[iv.Intervals]) -> pd.DataFrame:
    """Return one row, share: how much of its host's own time in the traced steps a rank spends within chunks.

    Raises NotMeasured where chunks or the host's time were not recorded.
    """
    own = partition.get("host", iv.EMPTY)
    if not iv.total(own):
        raise NotMeasured("the trace shows no time of the host's own")
    return pd.DataFrame({"share": [iv.total(iv.intersect(own, chunk_times.get())) / iv.total(own)]})


@per_rank
def least_of_kernels(
    device_work: pd.DataFrame, launched_within: NDArray[np.int64], main_stream: NDArray[np.bool_], timing: Timing
) -> pd.DataFrame:
    """Return one row, ns: what a steady traced step's kernels take however little they compute.

    That is LEAST_KERNEL_NS, and the median time from one queued kernel to the next, as often as there are kernels.
    Raises NotMeasured where the trace holds no device that computes.
    """
    inside = launched_within >= 0
    kernels = device_work[inside & host.is_kind(device_work, "kernel") & main_stream]
    if not len(kernels):
        raise NotMeasured("the trace holds no kernels")
    start, dur = kernels["start_ns"].to_numpy(), kernels["dur_ns"].to_numpy()
    between = start[1:] - start[:-1] - dur[:-1]
    between = between[(between >= 0) & (between <= LATENCY_NS)]
    next_ns = float(np.median(between)) if len(between) else 0.0
    least = float(np.minimum(dur, device.LEAST_KERNEL_NS).sum()) + len(dur) * next_ns
    return pd.DataFrame({"ns": [least / max(len(timing.windows), 1)]})


@across_ranks
def pipeline_plans(
    pipes: list[Pipe],
    pipelines: Maybe[pd.DataFrame],
    host_in_chunks: Maybe[pd.DataFrame],
    breakdown: Maybe[pd.DataFrame],
    least_of_kernels: Maybe[pd.DataFrame],
    why_not_replayed: Maybe[str],
    job: Job,
) -> pd.DataFrame:
    """Return what each change would make of a pipeline's mean step, by replay; the first row of each is as it is.

    Columns: ranks (of the pipeline, as `pipeline` has them), change (in words), schedule, microbatches, chunks (stages
    a rank), easy (it is one line of the script), even (it evens out the stages and changes nothing else), step_ns,
    gain_ns (of one call of schedule.step()), bubble (mean over the ranks). Raises NotMeasured where none can be
    replayed, or the schedule is none that is known here.
    """
    parts = []
    for pipe in pipes:
        model = _model(
            pipe, _fixed(pipelines, host_in_chunks, breakdown, least_of_kernels, job, pipe), on_cpu=settings.on_cpu(job)
        )
        if model is None:
            continue
        rows = []
        for plan in _plans(pipe, settings.training_loader(job).get("batch_size")):
            step = model.step(plan)
            if isfinite(step):
                rows.append((plan.change, plan.schedule, plan.microbatches, plan.chunks, plan.easy, plan.even, step))
        frame = pd.DataFrame(rows, columns=["change", "schedule", "microbatches", "chunks", "easy", "even", "step_ns"])
        busy = float(np.mean(list(pipe.busy_ns.values())))
        parts.append(
            frame.assign(
                ranks=", ".join(map(str, pipe.ranks)),
                gain_ns=pipe.step_ns - frame["step_ns"],
                bubble=(1 - busy / frame["step_ns"]).clip(lower=0.0),
            )
        )
    if parts:
        return pd.concat(parts, ignore_index=True)
    told = pipelines.get()
    names = sorted({str(s) for s in told["schedule"]} - set(SCHEDULES))
    raise NotMeasured(f"what {names[0]} does is not known here" if names else why_not_replayed.get())


def _plans(pipe: Pipe, batch: object) -> list[_Plan]:
    """Return what may be changed, as it is first."""
    p, m, v, now = len(pipe.ranks), pipe.microbatches, pipe.chunks, pipe.schedule
    name = now.removeprefix("Schedule")
    more = [n for n in (2 * m, 4 * m) if not isinstance(batch, int) or batch % n == 0]
    plans = [_Plan("as it is", now, m, v, easy=False)]
    plans += [_Plan(f"{n} micro-batches", now, n, v, easy=True) for n in more]
    family = next(f for f in (SINGLE, LOOPED, V_SHAPED) if now in f)
    for other in SCHEDULES:
        if other == now:
            continue
        chunks = v if other in family else 1 if other in SINGLE else 2
        cut = "" if chunks == v and other in family else f", {chunks} stage{'s' if chunks > 1 else ''} a rank"
        plans.append(_Plan(other.removeprefix("Schedule") + cut, other, m, chunks, easy=other in family))
    if now in LOOPED:
        plans.append(_Plan(f"{name}, {2 * v} stages a rank", now, m, 2 * v, easy=False))
    if now in SINGLE:
        plans.append(_Plan(f"{INTERLEAVED.removeprefix('Schedule')}, 4 stages a rank", INTERLEAVED, m, 4, easy=False))
    plans.append(_Plan("even stages", now, m, v, easy=False, even=True))
    return [plan for plan in plans if runs(plan.schedule, p, plan.microbatches, plan.chunks)]


@dataclass(frozen=True)
class _Model:
    """A pipeline as the sum of its parts, which can be put together anew; `scale` makes it what was measured."""

    pipe: Pipe
    fixed: Mapping[int, float]
    hand_over_ns: float
    start_ns: float  # what of handing over takes as long for a smaller micro-batch
    scale: float

    def step(self, plan: _Plan) -> float:
        """Return how long the step takes by a plan, ns."""
        if plan.even:
            return self.pipe.step_ns - self.pipe.saved_by_even(self.hand_over_ns)
        moving = (self.hand_over_ns - self.start_ns) * self.pipe.microbatches / plan.microbatches
        return self.scale * _replayed(self.pipe, plan, self.fixed, self.start_ns + moving)


def _fixed(
    pipelines: Maybe[pd.DataFrame],
    host_in_chunks: Maybe[pd.DataFrame],
    breakdown: Maybe[pd.DataFrame],
    least_of_kernels: Maybe[pd.DataFrame],
    job: Job,
    pipe: Pipe,
) -> dict[int, float]:
    """Return the share of each stage's chunks that is no shorter for a smaller micro-batch; 0 where that is not known.

    On a CPU that is the host's own, on a device the least that its kernels take.
    """
    try:
        told = pipelines.get().set_index("rank")["calls_a_step"]
        if settings.on_cpu(job):
            within = host_in_chunks.get().set_index("rank")["share"]
            least = {r: ns * float(within.get(r, 0.0)) for r, ns in part(breakdown.get(), "host").items()}
        else:
            least = by_rank(least_of_kernels.get(), "ns")
    except NotMeasured:
        return {}
    of = {r: min(1.0, least.get(r, 0.0) / float(told[r]) / max(pipe.busy_ns[r], 1.0)) for r in pipe.ranks}
    return {stage: of[r] for r, row in zip(pipe.ranks, pipe.rows, strict=True) for stage, _, _ in row}


def _model(pipe: Pipe, fixed: Mapping[int, float], *, on_cpu: bool) -> _Model | None:
    """Find what handing over takes where the pipeline as it is takes what was measured; None: its grid is not known."""
    now = _Plan("", pipe.schedule, pipe.microbatches, pipe.chunks, easy=False)
    if not runs(pipe.schedule, len(pipe.ranks), pipe.microbatches, pipe.chunks):
        return None
    hand_over = pipe.hand_over()
    predicted = _replayed(pipe, now, fixed, hand_over)
    start = hand_over if on_cpu else min(hand_over, SEND_START_NS)
    return _Model(pipe, fixed, hand_over, start, pipe.step_ns / predicted) if predicted > 0 else None


def _replayed(pipe: Pipe, plan: _Plan, fixed: Mapping[int, float], hand_over: float) -> float:
    """Replay a plan's grid, launching as it is."""
    made = grid(plan.schedule, len(pipe.ranks), plan.microbatches, plan.chunks)
    took = _lengths(pipe, plan, fixed)
    rest = sum(ns for (_, what), ns in pipe.mean.items() if what == "reduce") / len(pipe.ranks)
    lengths: dict[Action, float] = {a: took[a[1]][a[0]] for row in made.rows for a in row}
    return replay(made.rows, lengths, made.held, pipe.launch_ns, hand_over) + pipe.edge_ns + rest


def _lengths(pipe: Pipe, plan: _Plan, fixed: Mapping[int, float]) -> Mapping[str, Sequence[float]]:
    """Return how long each stage of a plan takes for each kind of action, ns."""
    of, before, after = pipe.mean, pipe.stages, len(pipe.ranks) * plan.chunks
    size = pipe.microbatches / plan.microbatches
    smaller = [fixed.get(s, 0.0) * (1 - size) + size for s in range(before)]
    forward = _cut([of.get((s, "forward"), 0.0) * smaller[s] for s in range(before)], after)
    whole = [backward_ns(of, s) * smaller[s] for s in range(before)]
    halves = [(of.get((s, "input"), 0.0), of.get((s, "weight"), 0.0)) for s in range(before)]
    inputs = [b * (i / (i + w) if i and w else 0.5) for b, (i, w) in zip(whole, halves, strict=True)]
    if plan.schedule in SPLIT and plan.schedule == pipe.schedule:
        # Whole and in halves a pass may differ; as it is, each is what it was.
        inputs = [i * k if i else b for (i, _), b, k in zip(halves, inputs, smaller, strict=True)]
        weight = [w * k if w else b - i for (_, w), b, i, k in zip(halves, whole, inputs, smaller, strict=True)]
    else:
        weight = [b - i for b, i in zip(whole, inputs, strict=True)]
    return {
        "forward": forward,
        "backward": _cut(whole, after),
        "input": _cut(inputs, after),
        "weight": _cut(weight, after),
    }


def _cut(stages: Sequence[float], count: int) -> list[float]:
    """Cut a pipeline's work into another number of stages, each the same share of it as the layers lie now."""
    edges = np.linspace(0, len(stages), count + 1)
    done = np.interp(edges, range(len(stages) + 1), np.concatenate(([0.0], np.cumsum(stages))))
    return [float(x) for x in np.diff(done)]
