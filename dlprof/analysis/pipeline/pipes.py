"""Pipelines with the traces of all ranks: their mean step as recorded, their bubbles and stages, and their length with
other chunks.

The bubble is the idle share of one synchronous step, which is schedule.step() on the rank that holds the first stage:
the first forward begins there, and the last backward ends it. Another rank's own call may begin early and end early.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property
from math import isnan, nan
from typing import Any

import numpy as np
import pandas as pd
from msgspec import Struct

from dlprof.analysis.engine import JOB, Frame, Job, Maybe, across_ranks, maybe, needs
from dlprof.analysis.pipeline.chunks import SCHEDULE, WHICH, pipeline, pipeline_chunks
from dlprof.analysis.pipeline.schedules import Action, closed_form, grid, replay, runs
from dlprof.errors import NotMeasured
from dlprof.units import few

# The most parallel pipelines that are replayed, from the fastest to the slowest: they run the same schedule.
MOST_PIPES = 16

_BISECTIONS = 12  # of the time that a hand-over takes: to a few thousandths of the upper bound

Lengths = Mapping[tuple[int, str], float]  # ns of each stage's kinds of action


class Pipe(Struct, frozen=True, dict=True):
    """One pipeline: how its mean step went, and all that is needed to replay it. All times in ns.

    `rows` is what each of its `ranks` did, in order. `took` has the lengths of one call each, a loss counted with its
    forward; `mean` those by stage and action. `busy_ns` is each rank's time in chunks; `edge_ns` lies before the first
    and after the last one of the rank with the first stage; `launch_ns` before a chunk that waits for no other rank.
    """

    schedule: str
    microbatches: int
    chunks: int  # stages a rank
    calls_a_step: float
    ranks: tuple[int, ...]
    rank_of: Mapping[int, int]  # of each stage
    step_ns: float
    busy_ns: Mapping[int, float]
    rows: tuple[tuple[Action, ...], ...]
    took: tuple[Mapping[Action, float], ...]
    mean: Lengths
    edge_ns: float
    launch_ns: float

    @property
    def stages(self) -> int:
        """How many stages it has."""
        return len(self.ranks) * self.chunks

    @property
    def is_known(self) -> bool:
        """Whether the grid of its schedule is known."""
        return runs(self.schedule, len(self.ranks), self.microbatches, self.chunks)

    def backward_ns(self, stage: int) -> float:
        """Return how long a whole backward pass of a stage takes, ns, recorded whole or in halves."""
        halves = self.mean.get((stage, "input"), nan) + self.mean.get((stage, "weight"), nan)
        return self.mean.get((stage, "backward"), 0.0 if isnan(halves) else halves)

    def lengths(self, of: Lengths) -> dict[Action, float]:
        """Return the length of every action of the rows, by its stage and kind."""
        return {a: of[a[:2]] for row in self.rows for a in row}

    @cached_property
    def even(self) -> Lengths:
        """The mean lengths as if all stages were alike: each kind of action has its mean over the stages."""
        mean = pd.Series(self.mean).groupby(level=1).mean()
        return {(stage, what): float(mean[what]) for stage, what in self.mean}

    @cached_property
    def _held(self) -> frozenset[Action]:
        shape = (self.schedule, len(self.ranks), self.microbatches, self.chunks)
        return grid(*shape).held if self.is_known else frozenset()

    def again(self, lengths: Mapping[Action, float], launch: float = 0.0, hand_over: float = 0.0) -> float:
        """Replay its step with other lengths, ns."""
        return replay(self.rows, lengths, self._held, launch, hand_over)

    def mean_step(self, calls: Iterable[Mapping[Action, float]], hand_over: float) -> float:
        """Replay calls one by one, and return their mean, ns, with all that is around their chunks."""
        return float(np.mean([self.again(took, self.launch_ns, hand_over) for took in calls])) + self.edge_ns

    @cached_property
    def hand_over_ns(self) -> float:
        """How long a hand-over takes: with it the recorded calls, replayed, take what was measured.

        Each call is replayed with its own chunks: their means, without the spread, would leave that to the hand-over.
        """
        low, high = 0.0, max(0.0, self.step_ns - self.mean_step(self.took, 0.0))
        for _ in range(_BISECTIONS if high else 0):
            middle = (low + high) / 2
            low, high = (middle, high) if self.mean_step(self.took, middle) < self.step_ns else (low, middle)
        return low

    @cached_property
    def saved_by_even_ns(self) -> float:
        """The saving of even stages: every call replayed, each chunk ÷ the mean of its kind in the recording."""
        calls = [
            {a: ns * self.even[a[:2]] / self.mean[a[:2]] if self.mean[a[:2]] else ns for a, ns in took.items()}
            for took in self.took
        ]
        return self.mean_step(self.took, self.hand_over_ns) - self.mean_step(calls, self.hand_over_ns)


@across_ranks
def pipelines(pipeline: Maybe[Frame] = maybe(pipeline), job: Job = needs(JOB)) -> pd.DataFrame:
    """Return rows of `pipeline`; with traces from elsewhere, only of pipelines with the same calls on all ranks.

    Raises NotMeasured where there are none: several pipelines may run in parallel, and the ranks of each are not known.
    """
    frame = pipeline.get()
    if any(job.facts.values()):
        return frame
    here = set(job.ranks)
    alike = [of for of, mine in frame.groupby("ranks") if here & set(_ranks(of)) == set(mine["rank"])]
    if not alike:
        raise NotMeasured(next(iter(pipeline.lacking.values()), WHICH))
    return frame[frame["ranks"].isin(alike)]


@across_ranks
def pipes(pipelines: Frame = needs(pipelines), pipeline_chunks: Frame = needs(pipeline_chunks)) -> list[Pipe]:
    """Return the pipelines that can be replayed: all ranks are here, and have the chunks of a call in common.

    Of many, MOST_PIPES. Raises NotMeasured with the reason where there is none.
    """
    here = pipelines[pipelines["ranks"].isin(_replayed(pipelines))].set_index("rank", drop=False)
    chunks = pipeline_chunks[pipeline_chunks["rank"].isin(here["rank"])]
    of_pipe = dict(iter(chunks.groupby(chunks["rank"].map(here["ranks"]))))
    mine = {ranks: frame for ranks, frame in here.groupby("ranks") if ranks in of_pipe}
    found = [pipe for ranks, frame in mine.items() if (pipe := _pipe(frame, of_pipe[ranks]))]
    if found:
        return found
    missing = sorted({rank for ranks in pipelines["ranks"] for rank in _ranks(ranks)} - set(pipelines["rank"]))
    raise NotMeasured(
        f"a pipeline is replayed from the chunks of all its ranks, and those of rank {few(missing, 8)} are not here"
        if missing
        else "the ranks of no pipeline have the chunks of the same step"
    )


def _replayed(pipelines: pd.DataFrame) -> list[str]:
    """Return the pipelines to replay, by their ranks: if many are complete, evenly drawn from fastest to slowest."""
    by = pipelines.groupby("ranks")
    steps = by["dur_ns"].max()[by.size() == by["size"].first()].sort_values(kind="stable")
    if len(steps) <= MOST_PIPES:
        return pipelines["ranks"].unique().tolist()
    return steps.index[np.linspace(0, len(steps) - 1, MOST_PIPES).round().astype(int)].tolist()


def _ranks(text: object) -> list[int]:
    """Return the ranks, or stages, of a cell of `pipeline`."""
    return [int(rank) for rank in str(text).split(", ")]


def _pipe(pipeline: pd.DataFrame, chunks: pd.DataFrame) -> Pipe | None:
    """Return one pipeline of its rows of `pipeline`; None where it cannot be replayed."""
    pipeline = pipeline.assign(stage=[_ranks(stages)[0] for stages in pipeline["stages"]]).sort_values("stage")
    first = pipeline.to_dict("records")[0]
    whole = len(pipeline) == first["size"] and first["first_stage"]
    if not whole or pipeline["stages"].duplicated().any() or pipeline["chunks"].nunique() != 1:
        return None
    ranks = tuple(pipeline["rank"].tolist())
    done = _actions(chunks)
    orders = {}
    for call, mine in done.groupby(["step", "call"]):
        by_rank = mine.groupby("rank")["action"].agg(tuple)
        if len(by_rank) == len(ranks):
            orders[call] = tuple(by_rank[list(ranks)])
    if not orders:
        return None
    # Calls that did something else (other micro-batches, an interrupted step) are left out.
    usual = Counter(orders.values()).most_common(1)[0][0]
    chosen = [call for call, order in orders.items() if order == usual]
    done = done.set_index(["step", "call"]).loc[chosen]
    lead = done[done["rank"] == ranks[0]].groupby(level=["step", "call"])
    lengths = chunks[(chunks["rank"] == ranks[0]) & (chunks["action"] == SCHEDULE)]
    lengths = lengths.set_index(["step", "call"])["dur_ns"].loc[chosen]
    busy: Any = done.groupby("rank")["dur_ns"].sum() / len(chosen)
    mean: Any = done.groupby(["stage", "what"])["dur_ns"].mean()
    rank_of = {stage: rank for rank, row in zip(ranks, usual, strict=True) for stage, _, _ in row}
    source = done["stage"] + done["what"].map({"forward": -1, "backward": 1, "input": 1})
    gaps = done["gap_ns"][source.map(rank_of).fillna(done["rank"]) == done["rank"]].dropna()
    return Pipe(
        **{key: first[key] for key in ("schedule", "microbatches", "chunks", "calls_a_step")},
        ranks=ranks,
        rank_of=rank_of,
        step_ns=float(lengths.mean()),
        busy_ns=busy.to_dict(),
        rows=usual,
        took=tuple(dict(zip(one["action"], one["dur_ns"], strict=True)) for _, one in done.groupby(["step", "call"])),
        mean=mean.to_dict(),
        edge_ns=float((lengths - (lead["end_ns"].last() - lead["start_ns"].first())).clip(lower=0).mean()),
        launch_ns=max(0.0, float(gaps.median())) if len(gaps) else 0.0,
    )


def _actions(chunks: pd.DataFrame) -> pd.DataFrame:
    """Return a row an action, a loss as part of its forward; gap_ns: since the rank's action before it in the call."""
    frame = chunks[chunks["action"] != SCHEDULE]
    frame = frame.assign(end_ns=frame["start_ns"] + frame["dur_ns"], what=frame["action"].replace("loss", "forward"))
    by = frame.groupby(["step", "call", "rank", "stage", "what", "microbatch"], sort=False, as_index=False)
    frame = by.agg({"start_ns": "first", "end_ns": "last", "dur_ns": "sum"})
    before = frame.groupby(["step", "call", "rank"])["end_ns"].shift(fill_value=-1)
    return frame.assign(
        action=pd.Series(zip(frame["stage"], frame["what"], frame["microbatch"], strict=True), dtype=object),
        gap_ns=(frame["start_ns"] - before).where(before >= 0),
    )


_SHARES = ("simulated", "scheduled")
_COLUMNS = ("rank", "step_ns", "busy_ns", *_SHARES, "schedule_ns", "imbalance_ns", "launch_ns", "communication_ns")


@across_ranks
def bubbles(pipelines: Frame = needs(pipelines), pipes: Maybe[list[Pipe]] = maybe(pipes)) -> pd.DataFrame:
    """Return the bubble of each rank: the columns of `pipeline`, its share of the step, that step, and its cause.

    `step_ns` is the synchronous step of the rank's pipeline, and `bubble` the idle share of it; where the rank with the
    first stage is not here, of its own. `simulated` is the bubble of the same chunks in the same order if launching and
    handing over took no time, `scheduled` that with stages and micro-batches alike as well, `closed` the closed form.

    The idle time is the sum of four, in ns of the mean step: schedule_ns, what even stages would leave idle;
    imbalance_ns, what uneven stages and micro-batches add to it; launch_ns, the host between chunks that wait for no
    other rank; communication_ns, the rest, which is handing over. A stage that is longer than the others is idle for
    less than among even ones: its imbalance_ns is negative. NaN where a pipeline cannot be replayed.
    """
    parts = [row for pipe in pipes.or_none() or [] for row in _parts(pipe)]
    replayed = pd.DataFrame(parts, columns=list(_COLUMNS)).astype(float).set_index("rank")
    # One set of figures: where chunks are known, all of it is of the calls that they are of.
    first = pipelines[pipelines["first_stage"]].drop_duplicates("ranks").set_index("ranks")["dur_ns"]
    step = pipelines["ranks"].map(first).fillna(pipelines["dur_ns"])
    measured = pd.DataFrame({"step_ns": step, "busy_ns": pipelines["busy_ns"]}).set_axis(pipelines["rank"])
    frame = pipelines.drop(columns="busy_ns").join(replayed.combine_first(measured), on="rank")
    shapes = frame[["schedule", "size", "microbatches", "chunks"]].itertuples(index=False, name=None)
    return frame.assign(
        bubble=(1 - frame["busy_ns"] / frame["step_ns"]).clip(lower=0.0),
        closed=[closed_form(*shape) for shape in shapes],
    )


def _parts(pipe: Pipe) -> list[tuple[float, ...]]:
    """Return what a pipeline's idle time comes from, a row of _COLUMNS for each rank."""
    alike = pipe.lengths(pipe.even)
    even = pipe.again(alike)
    own = float(np.mean([pipe.again(took) for took in pipe.took]))
    launched = min(pipe.mean_step(pipe.took, 0.0), pipe.step_ns)
    rows: list[tuple[float, ...]] = []
    for rank, row in zip(pipe.ranks, pipe.rows, strict=True):
        busy, idle = pipe.busy_ns[rank], even - sum(alike[a] for a in row)
        shares = (1 - busy / own, idle / even)
        rows.append(
            (rank, pipe.step_ns, busy, *shares, idle, own - busy - idle, launched - own, pipe.step_ns - launched)
        )
    return rows


@across_ranks
def stage_lengths(pipes: list[Pipe] = needs(pipes)) -> pd.DataFrame:
    """Return how long each stage works on a micro-batch, and what even ones would save their pipeline.

    Columns: ranks (as `pipeline` has them), rank, stage, forward_ns, backward_ns (both halves of it), stage_ns (their
    sum); and of the pipeline saved_ns (what even stages save of its measured step, in which they wait more often for
    handing over and for each other's chunks that happen to be slow) and calls_a_step.
    """
    rows = [
        {
            "ranks": ", ".join(map(str, pipe.ranks)),
            "rank": pipe.rank_of[stage],
            "stage": stage,
            "forward_ns": pipe.mean.get((stage, "forward"), 0.0),
            "backward_ns": pipe.backward_ns(stage),
            "saved_ns": pipe.saved_by_even_ns,
            "calls_a_step": pipe.calls_a_step,
        }
        for pipe in pipes
        for stage in range(pipe.stages)
    ]
    frame = pd.DataFrame(rows)
    return frame.assign(stage_ns=frame["forward_ns"] + frame["backward_ns"])
