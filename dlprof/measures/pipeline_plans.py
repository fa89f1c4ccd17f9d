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

from dlprof.engine import Measured, across_ranks
from dlprof.errors import NotMeasured
from dlprof.measures import settings
from dlprof.measures.pipeline import Pipe, backward_ns, pipeline, pipeline_chunks, pipes, why_not_replayed
from dlprof.measures.schedules import (
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

# What a plan takes for granted, for the findings that are made of them.
ASSUMED = (
    "half a stage, or a micro-batch of half the size, takes half as long; launching a chunk and handing it over take as"
    " long as now; the halves of a backward pass are alike where they were not measured"
)

_BISECTIONS = 12  # of what handing over takes: a few thousandths of what is laid upon it


@dataclass(frozen=True)
class _Plan:
    """One thing to change. `easy`: it is one line of the script."""

    change: str
    schedule: str
    microbatches: int
    chunks: int
    easy: bool
    even: bool = False


@across_ranks(pipeline, pipeline_chunks)
def pipeline_plans(run: Measured) -> pd.DataFrame:
    """Give what each change would make of a pipeline's mean step, by replay; the first row of each is as it is.

    Columns: ranks (of the pipeline, as `pipeline` has them), change (in words), schedule, microbatches, chunks (stages
    a rank), easy (it is one line of the script), even (it evens out the stages and changes nothing else), step_ns,
    gain_ns (of one call of schedule.step()), bubble (mean over the ranks). Raises NotMeasured where none can be
    replayed, or the schedule is none that is known here.
    """
    parts = []
    for pipe in pipes(run):
        model = _model(pipe)
        if model is None:
            continue
        rows = []
        for plan in _plans(pipe, settings.training_loader(run).get("batch_size")):
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
    told = run.frame(pipeline)
    names = sorted({str(s) for s in told["schedule"]} - set(SCHEDULES))
    raise NotMeasured(f"what {names[0]} does is not known here" if names else why_not_replayed(run))


def _plans(pipe: Pipe, batch: object) -> list[_Plan]:
    """Give what may be changed, as it is first."""
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
    hand_over_ns: float
    scale: float

    def step(self, plan: _Plan) -> float:
        """Give how long the step takes by a plan, ns."""
        return self.scale * _replayed(self.pipe, plan, self.hand_over_ns)


def _model(pipe: Pipe) -> _Model | None:
    """Find what handing over takes where the pipeline as it is takes what was measured; None: its grid is not known."""
    now = _Plan("", pipe.schedule, pipe.microbatches, pipe.chunks, easy=False)
    if not runs(pipe.schedule, len(pipe.ranks), pipe.microbatches, pipe.chunks):
        return None
    # From each call's own chunks: with their means, which know of no bad luck, handing over would be blamed for it.

    def measured(hand_over: float) -> float:
        return float(np.mean([pipe.again(took, pipe.launch_ns, hand_over) for took in pipe.took])) + pipe.edge_ns

    low, high = 0.0, max(0.0, pipe.step_ns - measured(0.0))
    for _ in range(_BISECTIONS if high else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if measured(middle) < pipe.step_ns else (low, middle)
    predicted = _replayed(pipe, now, low)
    return _Model(pipe, low, pipe.step_ns / predicted) if predicted > 0 else None


def _replayed(pipe: Pipe, plan: _Plan, hand_over: float) -> float:
    """Replay a plan's grid, launching as it is."""
    made = grid(plan.schedule, len(pipe.ranks), plan.microbatches, plan.chunks)
    took = _lengths(pipe, plan)
    rest = sum(ns for (_, what), ns in pipe.mean.items() if what == "reduce") / len(pipe.ranks)
    lengths: dict[Action, float] = {a: took[a[1]][a[0]] for row in made.rows for a in row}
    return replay(made.rows, lengths, made.held, pipe.launch_ns, hand_over) + pipe.edge_ns + rest


def _lengths(pipe: Pipe, plan: _Plan) -> Mapping[str, Sequence[float]]:
    """Give how long each stage of a plan takes for each kind of action, ns."""
    of, before, after = pipe.even() if plan.even else pipe.mean, pipe.stages, len(pipe.ranks) * plan.chunks
    smaller = pipe.microbatches / plan.microbatches
    forward = _cut([of.get((s, "forward"), 0.0) * smaller for s in range(before)], after)
    whole = [backward_ns(of, s) * smaller for s in range(before)]
    halves = [(of.get((s, "input"), 0.0), of.get((s, "weight"), 0.0)) for s in range(before)]
    inputs = [b * (i / (i + w) if i and w else 0.5) for b, (i, w) in zip(whole, halves, strict=True)]
    if plan.schedule in SPLIT and plan.schedule == pipe.schedule:
        # Whole and in halves a pass may differ; as it is, each is what it was.
        inputs = [i * smaller if i else b for (i, _), b in zip(halves, inputs, strict=True)]
        weight = [w * smaller if w else b - i for (_, w), b, i in zip(halves, whole, inputs, strict=True)]
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
