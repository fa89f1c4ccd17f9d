"""What a pipeline's step would be with more micro-batches, more stages a rank, another schedule, or even stages.

Every plan is the grid of a schedule, replayed with this run's own chunk times, and with hand-overs that explain the
measured step. All are scaled by the measured step ÷ the replay "as it is".

What each schedule leaves idle, and what its ranks hold meanwhile: activations of micro-batches, copies of weights.

Of a schedule that torch runs, the grid is gone through: a rank holds what a forward pass leaves until the last half of
its backward pass is through. Of others there are closed forms alone, from Li and Hoefler, Chimera, SC 2021, table 2.
All of it is of stages alike, a backward pass twice as long as the forward pass, and handing over for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from msgspec import Struct
from msgspec.structs import asdict, replace
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis import settings
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, across_ranks, by_rank, maybe, needs, per_rank
from dlprof.analysis.pipeline.chunks import inside_chunks
from dlprof.analysis.pipeline.pipes import Pipe, pipes
from dlprof.analysis.pipeline.schedules import (
    FAMILIES,
    INTERLEAVED,
    SCHEDULES,
    SINGLE,
    SPLIT,
    Action,
    grid,
    replay,
    runs,
    short,
)
from dlprof.analysis.step.breakdown import breakdown
from dlprof.analysis.step.partition import partition
from dlprof.analysis.timeline import device, host
from dlprof.analysis.timeline.device import LATENCY_NS, device_work
from dlprof.analysis.timeline.steps import Timing, launched_within, main_stream, timing
from dlprof.errors import NotMeasured

# What a send between GPUs is taken to need before its bytes move: a choice, rather too much than too little.
SEND_START_NS = 50_000

# What a plan assumes, for the findings that are made of them.
ASSUMED = (
    "half a stage takes half as long, and so does computing a micro-batch of half the size; the Python within it, or"
    " the least that a kernel takes, launching, and handing over on a CPU take as long as now; between devices half as"
    " much is handed over in half the time; the halves of a backward pass are alike where they were not"
    " measured"
)


class _Plan(Struct, frozen=True):
    """One thing to change. `easy`: it is one line of the script. `even`: the stages, and nothing else."""

    change: str
    schedule: str
    microbatches: int
    chunks: int  # stages a rank
    easy: bool = False
    even: bool = False


@per_rank
def python_in_chunks(
    partition: dict[str, iv.Intervals] = needs(partition),
    chunks: Frame = needs(schema.CHUNKS),
    breakdown: Frame = needs(breakdown),
) -> pd.DataFrame:
    """Return one row, ns: the host's own time of a mean steady step within chunks, as far as the traced ones show."""
    own = partition.get("host", iv.EMPTY)
    if not iv.total(own):
        raise NotMeasured("the trace shows no time of the host's own")
    share = iv.total(iv.intersect(own, inside_chunks(chunks))) / iv.total(own)
    return pd.DataFrame({"ns": [share * breakdown.loc[breakdown["category"] == "host", "ns"].sum()]})


@per_rank
def least_of_kernels(
    device_work: Frame = needs(device_work),
    launched_within: NDArray[np.int64] = needs(launched_within),
    main_stream: NDArray[np.bool_] = needs(main_stream),
    timing: Timing = needs(timing),
) -> pd.DataFrame:
    """Return one row, ns: what a steady traced step's kernels take however little they compute.

    That is LEAST_KERNEL_NS, and the median time from one queued kernel to the next, as often as there are kernels.
    """
    kernels = device_work[(launched_within >= 0) & host.is_kind(device_work, "kernel") & main_stream]
    if not len(kernels):
        raise NotMeasured(device.NOT_IN_STEPS if len(device_work) else device.NO_DEVICE_WORK)
    start, dur = kernels["start_ns"].to_numpy(), kernels["dur_ns"].to_numpy()
    between = start[1:] - start[:-1] - dur[:-1]
    between = between[(between >= 0) & (between <= LATENCY_NS)]
    next_ns = float(np.median(between)) if len(between) else 0.0
    least = float(np.minimum(dur, device.LEAST_KERNEL_NS).sum()) + len(dur) * next_ns
    return pd.DataFrame({"ns": [least / max(len(timing.windows), 1)]})


@across_ranks
def pipeline_models(
    pipes: list[Pipe] = needs(pipes),
    python_in_chunks: Maybe[Frame] = maybe(python_in_chunks),
    least_of_kernels: Maybe[Frame] = maybe(least_of_kernels),
    job: Job = needs(JOB),
) -> list[Model]:
    """Return the model of each pipeline whose schedule is known; raise NotMeasured where there is none."""
    on_cpu = settings.on_cpu(job)
    least = (python_in_chunks if on_cpu else least_of_kernels).or_none()
    least_ns = {} if least is None else by_rank(least, "ns")
    known = [pipe for pipe in pipes if pipe.is_known]
    if not known:
        raise NotMeasured(f"what {min(pipe.schedule for pipe in pipes)} does is not known here")
    return [Model(p, least_ns, p.hand_over_ns if on_cpu else min(p.hand_over_ns, SEND_START_NS)) for p in known]


@across_ranks
def pipeline_plans(pipeline_models: list[Model] = needs(pipeline_models), job: Job = needs(JOB)) -> pd.DataFrame:
    """Return what each change would make of a pipeline's mean step, by replay; the first row of each is as it is.

    Columns: ranks (of the pipeline, as `pipeline` has them), change (in words), schedule, microbatches, chunks (stages
    a rank), easy (it is one line of the script), even (it evens out the stages and changes nothing else), step_ns,
    gain_ns (of one call of schedule.step()), bubble (mean over the ranks).
    """
    batch = settings.training_loader(job).get("batch_size")
    rows: list[dict[str, Any]] = []
    for model in pipeline_models:
        pipe = model.pipe
        ranks, busy = ", ".join(map(str, pipe.ranks)), float(np.mean(list(pipe.busy_ns.values())))
        for plan in _plans(pipe, batch):
            step = model.step(plan)
            then = {"step_ns": step, "gain_ns": pipe.step_ns - step, "bubble": max(0.0, 1 - busy / step)}
            rows.append({"ranks": ranks, **asdict(plan), **then})
    return pd.DataFrame(rows)


def _plans(pipe: Pipe, batch: object) -> list[_Plan]:
    """Return what may be changed; the first is as it is."""
    p, m, v = len(pipe.ranks), pipe.microbatches, pipe.chunks
    now = _Plan("as it is", pipe.schedule, m, v)
    more = [n for n in (2 * m, 4 * m) if not isinstance(batch, int) or batch % n == 0]
    plans = [now, *(replace(now, change=f"{n} micro-batches", microbatches=n, easy=True) for n in more)]
    family = next(family for family in FAMILIES if pipe.schedule in family)
    for other in (name for name in SCHEDULES if name != pipe.schedule):
        if other in family:
            plans.append(_Plan(short(other), other, m, v, easy=True))
        else:
            chunks, cut = (1, "1 stage") if other in SINGLE else (2, "2 stages")
            plans.append(_Plan(f"{short(other)}, {cut} a rank", other, m, chunks))
    other, chunks = (INTERLEAVED, 4) if family is SINGLE else (pipe.schedule, 2 * v)
    plans.append(_Plan(f"{short(other)}, {chunks} stages a rank", other, m, chunks))
    plans.append(replace(now, change="even stages", even=True))
    return [plan for plan in plans if runs(plan.schedule, p, plan.microbatches, plan.chunks)]


class Model(Struct, frozen=True, dict=True):
    """A pipeline as the sum of its parts, which can be recombined. All times in ns."""

    pipe: Pipe
    least_ns: Mapping[int, float]  # of a rank's step, what is no shorter for smaller micro-batches: Python, or kernels
    start_ns: float  # of a hand-over, what is no shorter for smaller micro-batches

    @cached_property
    def fixed(self) -> NDArray[np.float64]:
        """The share of each stage's chunks that is no shorter for a smaller micro-batch; 0 where that is not known."""
        ranks = [self.pipe.rank_of[stage] for stage in range(self.pipe.stages)]
        a_call = np.array([self.least_ns.get(rank, 0.0) for rank in ranks]) / self.pipe.calls_a_step
        busy = np.array([self.pipe.busy_ns[rank] for rank in ranks])
        share: NDArray[np.float64] = np.minimum(1.0, a_call / np.maximum(busy, 1.0))
        return share

    @cached_property
    def scale(self) -> float:
        """By what the replay of the pipeline as it is differs from what was measured."""
        pipe = self.pipe
        return pipe.step_ns / self._replayed(_Plan("", pipe.schedule, pipe.microbatches, pipe.chunks))

    def step_with(self, *, schedule: str | None = None, microbatches: int | None = None, even: bool = False) -> float:
        """Return how long the step takes with other settings, and even stages, ns.

        Raises NotMeasured where such a schedule cannot run, or is not known.
        """
        pipe = self.pipe
        names = {short(name).lower(): name for name in SCHEDULES}
        chosen = names.get(short(schedule).lower(), schedule) if schedule else pipe.schedule
        plan = _Plan("", chosen, microbatches or pipe.microbatches, pipe.chunks)
        if not runs(chosen, len(pipe.ranks), plan.microbatches, pipe.chunks):
            stages = f"{pipe.chunks} stages a rank and {plan.microbatches} micro-batches"
            raise NotMeasured(f"{short(chosen)} does not run with {stages} on {len(pipe.ranks)} ranks")
        # The stages are as uneven by any schedule.
        left = 1 - pipe.saved_by_even_ns / pipe.step_ns if even else 1.0
        return left * self.step(plan)

    def step(self, plan: _Plan) -> float:
        """Return how long the step takes by a plan, ns."""
        pipe = self.pipe
        return pipe.step_ns - pipe.saved_by_even_ns if plan.even else self.scale * self._replayed(plan)

    def _replayed(self, plan: _Plan) -> float:
        """Replay a plan's grid, launching as it is."""
        pipe = self.pipe
        made = grid(plan.schedule, len(pipe.ranks), plan.microbatches, plan.chunks)
        took = self._lengths(plan)
        lengths = {action: took[action[1]][action[0]] for row in made.rows for action in row}
        moving = (pipe.hand_over_ns - self.start_ns) * pipe.microbatches / plan.microbatches
        rest = sum(ns for (_, what), ns in pipe.mean.items() if what == "reduce") / len(pipe.ranks)
        return replay(made.rows, lengths, made.held, pipe.launch_ns, self.start_ns + moving) + pipe.edge_ns + rest

    def _lengths(self, plan: _Plan) -> dict[str, list[float]]:
        """Return how long each stage of a plan takes for each kind of action, ns."""
        pipe, now = self.pipe, range(self.pipe.stages)
        forward, inputs, weights = (
            np.array([pipe.mean.get((stage, what), 0.0) for stage in now]) for what in ("forward", "input", "weight")
        )
        whole = np.array([pipe.backward_ns(stage) for stage in now])
        if plan.schedule in SPLIT and plan.schedule == pipe.schedule:
            # Whole and in halves a pass may differ; as it is, each is what it was.
            inputs = np.where(inputs > 0, inputs, whole)
            weights = np.where(weights > 0, weights, whole - inputs)
        else:
            both = (inputs > 0) & (weights > 0)
            inputs = whole * np.divide(inputs, inputs + weights, out=np.full(len(now), 0.5), where=both)
            weights = whole - inputs
        size = pipe.microbatches / plan.microbatches
        smaller = self.fixed * (1 - size) + size
        kinds = {"forward": forward, "backward": whole, "input": inputs, "weight": weights}
        return {kind: _cut(ns * smaller, len(pipe.ranks) * plan.chunks) for kind, ns in kinds.items()}


def _cut(stages: NDArray[np.float64], count: int) -> list[float]:
    """Cut a pipeline's work into another number of stages, each the same share of it as the layers lie now."""
    edges = np.linspace(0, len(stages), count + 1)
    done = np.interp(edges, range(len(stages) + 1), np.concatenate(([0.0], np.cumsum(stages))))
    return [float(ns) for ns in np.diff(done)]


_TOOK = {"forward": 1.0, "backward": 2.0, "input": 1.0, "weight": 1.0}

GRID, FORMULA = "replayed", "closed form"


def most_held(row: Sequence[Action]) -> int:
    """Return the most micro-batches of a stage with activations held at a time, over a rank's actions in order."""
    held = most = 0
    for _, what, _ in row:
        held += {"forward": 1, "backward": -1, "weight": -1}.get(what, 0)
        most = max(most, held)
    return most


def schedules(ranks: int, microbatches: int) -> pd.DataFrame:
    """Return a row for each schedule that takes so many ranks and micro-batches.

    Columns: schedule, chunks (stages a rank; 2 where it needs several), idle (share of the step), activations (the most
    that a rank holds, as a share of what its layers leave of a whole batch), weights (copies of its parameters), how
    (GRID or FORMULA).
    """
    rows = [row for name in SCHEDULES if (row := _of_grid(name, ranks, microbatches)) is not None]
    return pd.DataFrame(
        [*rows, *_closed(ranks, microbatches)],
        columns=["schedule", "chunks", "idle", "activations", "weights", "how"],
    )


def _of_grid(name: str, ranks: int, microbatches: int) -> tuple[str, int, float, float, float, str] | None:
    chunks = 1 if name in SINGLE else 2
    if not runs(name, ranks, microbatches, chunks):
        return None
    made = grid(name, ranks, microbatches, chunks)
    step = replay(made.rows, {a: _TOOK[a[1]] / chunks for row in made.rows for a in row}, made.held)
    busy = microbatches * (_TOOK["forward"] + _TOOK["backward"])
    held = max(map(most_held, made.rows)) / chunks / microbatches
    return short(name), chunks, max(1 - busy / step, 0.0), held, 1.0, GRID


def _closed(ranks: int, microbatches: int) -> list[tuple[str, int, float, float, float, str]]:
    """Return schedules that torch does not run. Their weights are not all those of the last step, but Chimera's."""
    p, m = ranks, microbatches
    held = min(p, m) / m
    rows = [
        ("PipeDream (weights of older steps)", 1, 0.0, held, float(p), FORMULA),
        ("PipeDream-2BW (weights of the step before)", 1, 0.0, held, 2.0, FORMULA),
    ]
    if p % 2 == 0 and m >= p:
        rows.append(("Chimera (two pipelines, one each way)", 2, (p - 2) / (2 * m + p - 2), held, 2.0, FORMULA))
    return rows
