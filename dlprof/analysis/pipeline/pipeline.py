"""How long the stages of a pipeline stand idle: measured, replayed from their own chunks, and by the schedule alone.

The bubble is the idle share of one synchronous step. The step begins with the first stage's first forward, and its last
backward ends it, so its length is that of schedule.step() on the rank that holds the first stage: another rank's own
call may begin early and end early. Bubbles are told as shares of the step; papers also give them ÷ the time without,
under the same name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np
import pandas as pd

from dlprof.analysis.engine import Job, Maybe, RankFacts, across_ranks, per_rank
from dlprof.analysis.pipeline import pipeline_ranges
from dlprof.analysis.pipeline.schedules import GPIPE, INTERLEAVED, LOOPED_BFS, ONE_F_ONE_B, Action, grid, replay, runs
from dlprof.analysis.timeline.steady import standard_error
from dlprof.errors import NotMeasured

# Schedules that fill and drain once a step: (p − 1) of v·m + p − 1 slots are idle on each of p ranks, with v chunks a
# rank and m micro-batches (Huang et al., GPipe, 2019; Narayanan et al., Megatron-LM, 2021). What is published of those
# that split the backward holds only where forward, input and weight pass take the same time: their grid is replayed.
_FILL_AND_DRAIN = (GPIPE, ONE_F_ONE_B, INTERLEAVED, LOOPED_BFS)

# As many steps as travel with their chunks, spread over the run, and never more rows a rank than this.
_STEPS = 40

_MOST_ROWS = 4_000

SCHEDULE = "schedule"

_BISECTIONS = 12  # of what handing over takes: a few thousandths of what is laid upon it


def closed_form(schedule: str, ranks: int, microbatches: int, chunks: int) -> float:
    """Return the bubble that a schedule has with stages alike and hand-over for nothing; NaN: there is no such formula.

    It holds where the micro-batches are a multiple of the ranks.
    """
    if schedule not in _FILL_AND_DRAIN:
        return nan
    return (ranks - 1) / (chunks * microbatches + ranks - 1)


def _told(
    chunks: Maybe[pd.DataFrame], spans: Maybe[pd.DataFrame], schedule_facts: Maybe[Mapping[str, Any]], rank: RankFacts
) -> Mapping[str, Any]:
    told = rank.facts.get("pipeline")
    if chunks and isinstance(told, Mapping):
        return told
    if not rank.facts and spans:
        return schedule_facts.get()
    chunks.get()  # says why, where nothing was recorded
    raise NotMeasured("no step of a pipeline schedule was recorded")


def steady(
    chunks: Maybe[pd.DataFrame], steady_chunks: Maybe[pd.DataFrame], light_steps: Maybe[pd.DataFrame]
) -> pd.DataFrame:
    """Return the chunks of the steady steps; `call` counts the calls of schedule.step() within a step."""
    if not chunks:
        return steady_chunks.get()
    frame = chunks.get()
    number = frame["step"].to_numpy()
    # Within each step: a host that runs ahead of its device begins the next step's call while this one's chunks run.
    calls = (frame["action"] == SCHEDULE).astype("int64").groupby(number).cumsum().to_numpy() - 1
    steps = light_steps.get()
    steady = steps.loc[steps["steady"], "step"].to_numpy()
    return frame.assign(call=np.maximum(calls, 0))[np.isin(number, steady)]


@per_rank
def pipeline(
    chunks: Maybe[pd.DataFrame],
    spans: Maybe[pd.DataFrame],
    schedule_facts: Maybe[Mapping[str, Any]],
    steady_chunks: Maybe[pd.DataFrame],
    light_steps: Maybe[pd.DataFrame],
    rank: RankFacts,
) -> pd.DataFrame:
    """Return one row of the steady calls of schedule.step(): which schedule, and the mean call in ns.

    Columns: schedule, microbatches, stages and ranks (as text, ", " between), size (how many ranks), first_stage (this
    rank holds it), chunks (stages a rank), calls, calls_a_step (of training), dur_ns, busy_ns (inside chunks), noise_ns
    (standard error of what is left).
    """
    told = _told(chunks, spans, schedule_facts, rank)
    frame = steady(chunks, steady_chunks, light_steps)
    calls = frame[(frame["action"] == SCHEDULE).to_numpy()]
    if not len(calls):
        raise NotMeasured("no steady step ran the pipeline")
    idle = (calls["dur_ns"] - calls["busy_ns"]).to_numpy(dtype=float)
    return pd.DataFrame(
        {
            "schedule": [str(told["schedule"])],
            "microbatches": [int(told["microbatches"])],
            "stages": [", ".join(map(str, told["stages"]))],
            "ranks": [", ".join(map(str, told["ranks"]))],
            "size": [len(told["ranks"])],
            "first_stage": [0 in told["stages"]],
            "chunks": [len(told["stages"])],
            "calls": [len(calls)],
            "calls_a_step": [len(calls) / calls["step"].nunique()],
            "dur_ns": [float(calls["dur_ns"].mean())],
            "busy_ns": [float(calls["busy_ns"].mean())],
            "noise_ns": [standard_error(idle)],
        }
    )


@per_rank
def pipeline_chunks(
    chunks: Maybe[pd.DataFrame],
    spans: Maybe[pd.DataFrame],
    schedule_facts: Maybe[Mapping[str, Any]],
    steady_chunks: Maybe[pd.DataFrame],
    light_steps: Maybe[pd.DataFrame],
    rank: RankFacts,
) -> pd.DataFrame:
    """Return the chunks of some steady steps, one by one, and the row of the call that they belong to.

    Columns: step, call, stage, microbatch, action, start_ns, dur_ns. Ranks choose the same steps, as far as they have
    them: those whose numbers a power of two divides.
    """
    _told(chunks, spans, schedule_facts, rank)
    frame = steady(chunks, steady_chunks, light_steps)
    step = frame["step"].to_numpy()
    detailed = np.unique(step[(frame["action"] != SCHEDULE).to_numpy()])
    if not len(detailed):
        raise NotMeasured("no chunk of a steady step was recorded")
    frame = frame[np.isin(step, detailed)]
    stride = 1
    while True:
        shown = detailed[detailed % stride == 0] if (detailed % stride == 0).any() else detailed[:1]
        chosen = np.isin(frame["step"].to_numpy(), shown)
        if len(shown) == 1 or (len(shown) <= _STEPS and chosen.sum() <= _MOST_ROWS):
            break
        stride *= 2
    columns = ["step", "call", "stage", "microbatch", "action", "start_ns", "dur_ns"]
    return frame.loc[chosen, columns].astype({"action": "str"})


@dataclass(frozen=True)
class Pipe:
    """One pipeline whose ranks are all here: how its mean step went, and all that is needed to replay it.

    `rows` is what each of its `ranks` did, in order. `took` has the lengths of one call each, ns, a loss counted with
    its forward; `mean` those by stage and action. What is around a rank's chunks: `edge_ns`, before the first one and
    after the last one of the rank with the first stage; `launch_ns`, before a chunk that waits for no other rank.
    """

    schedule: str
    microbatches: int
    chunks: int
    ranks: tuple[int, ...]
    step_ns: float
    busy_ns: Mapping[int, float]
    rows: tuple[tuple[Action, ...], ...]
    held: frozenset[Action]
    took: tuple[Mapping[Action, float], ...]
    mean: Mapping[tuple[int, str], float]
    edge_ns: float
    launch_ns: float

    @property
    def stages(self) -> int:
        """How many stages it has."""
        return len(self.ranks) * self.chunks

    def lengths(self, of: Mapping[tuple[int, str], float]) -> dict[Action, float]:
        """Return every action of the rows the length that its stage and kind have."""
        return {a: of[a[:2]] for row in self.rows for a in row}

    def even(self) -> dict[tuple[int, str], float]:
        """Return the mean lengths as if all stages were alike: each kind of action has its mean over the stages."""
        by: dict[str, list[float]] = {}
        for (_, what), ns in self.mean.items():
            by.setdefault(what, []).append(ns)
        return {(stage, what): float(np.mean(by[what])) for stage, what in self.mean}

    def again(self, lengths: Mapping[Action, float], launch: float = 0.0, hand_over: float = 0.0) -> float:
        """Replay its step with other lengths, ns."""
        return replay(self.rows, lengths, self.held, launch, hand_over)

    def mean_step(self, calls: Iterable[Mapping[Action, float]], hand_over: float) -> float:
        """Replay calls one by one, and give their mean, ns, with all that is around their chunks."""
        return float(np.mean([self.again(took, self.launch_ns, hand_over) for took in calls])) + self.edge_ns

    def hand_over(self) -> float:
        """Return what handing over a chunk takes, ns: so much that recorded calls, replayed, take what was measured.

        Of each call its own chunks count: with their means, which know of no bad luck, it would be blamed for that too.
        """
        low, high = 0.0, max(0.0, self.step_ns - self.mean_step(self.took, 0.0))
        for _ in range(_BISECTIONS if high else 0):
            middle = (low + high) / 2
            low, high = (middle, high) if self.mean_step(self.took, middle) < self.step_ns else (low, middle)
        return low

    def saved_by_even(self, hand_over: float) -> float:
        """Return what even stages save of a step, ns: every call replayed, each chunk as lucky as it was."""
        even = self.even()
        calls = [
            {a: ns * even[a[:2]] / self.mean[a[:2]] if self.mean[a[:2]] else ns for a, ns in took.items()}
            for took in self.took
        ]
        return self.mean_step(self.took, hand_over) - self.mean_step(calls, hand_over)


@across_ranks
def pipelines(pipeline: Maybe[pd.DataFrame], job: Job) -> pd.DataFrame:
    """Return rows of `pipeline`; of traces from elsewhere those of pipelines of which all their ranks tell the same.

    Raises NotMeasured where none do: several may run side by side, and nothing tells which ranks are one.
    """
    frame = pipeline.get()
    if any(job.facts.values()):
        return frame
    here = set(job.ranks)
    told = [of for of, mine in frame.groupby("ranks") if here & set(map(int, str(of).split(", "))) == set(mine["rank"])]
    if not told:
        raise NotMeasured(next(iter(pipeline.lacking.values()), pipeline_ranges.WHICH))
    return frame[frame["ranks"].isin(told)]


@across_ranks
def pipes(pipelines: pd.DataFrame, pipeline_chunks: pd.DataFrame) -> list[Pipe]:
    """Return the pipelines that can be replayed: all ranks are here, and have the chunks of a call in common."""
    found = [
        _pipe(ranks, pipeline_chunks[pipeline_chunks["rank"].isin(ranks["rank"])])
        for _, ranks in pipelines.groupby("ranks")
    ]
    return [pipe for pipe in found if pipe is not None]


def _pipe(told: pd.DataFrame, chunks: pd.DataFrame) -> Pipe | None:
    shape = told.iloc[0]
    told = told.assign(first=[int(str(s).split(", ", 1)[0]) for s in told["stages"]]).sort_values("first")
    ranks = tuple(int(str(r)) for r in told["rank"])
    if (
        len(ranks) != int(shape["size"])
        or told["stages"].duplicated().any()
        or told["chunks"].nunique() != 1
        or not told["first_stage"].iloc[0]
    ):
        return None
    calls = [
        {key: _call(one) for key, one in chunks[chunks["rank"] == r].groupby(["step", "call"], sort=True)}
        for r in ranks
    ]
    shared = [key for key in calls[0] if all(key in mine for mine in calls)]
    rows = [tuple(mine[key].order for mine in calls) for key in shared]
    if not rows or not all(map(all, rows)):
        return None
    # Calls that did something else (other micro-batches, an interrupted step) are left out.
    usual = Counter(rows).most_common(1)[0][0]
    chosen = [[mine[key] for mine in calls] for key, row in zip(shared, rows, strict=True) if row == usual]
    took = tuple({action: ns for rank in call for action, ns in rank.took.items()} for call in chosen)
    sums: dict[tuple[int, str], list[float]] = {}
    for call in took:
        for (stage, what, _), ns in call.items():
            sums.setdefault((stage, what), []).append(ns)
    home = {stage: r for r, row in enumerate(usual) for stage, _, _ in row}
    gaps = [gap for call in chosen for r, rank in enumerate(call) for gap in rank.gaps(home, r)]
    schedule, m, v = str(shape["schedule"]), int(shape["microbatches"]), int(shape["chunks"])
    known = grid(schedule, len(ranks), m, v) if runs(schedule, len(ranks), m, v) else None
    return Pipe(
        schedule=schedule,
        microbatches=m,
        chunks=v,
        ranks=ranks,
        step_ns=float(np.mean([call[0].dur for call in chosen])),
        busy_ns={r: float(np.mean([sum(call[k].took.values()) for call in chosen])) for k, r in enumerate(ranks)},
        rows=usual,
        held=known.held if known is not None else frozenset(),
        took=took,
        mean={key: float(np.mean(ns)) for key, ns in sums.items()},
        edge_ns=float(np.mean([call[0].edge for call in chosen])),
        launch_ns=max(0.0, float(np.median(gaps))) if gaps else 0.0,
    )


@dataclass(frozen=True)
class _Call:
    """One schedule.step() on one rank."""

    dur: float
    edge: float  # before its first chunk and after its last
    order: tuple[Action, ...]
    took: Mapping[Action, float]
    begins: tuple[int, ...]
    ends: tuple[int, ...]

    def gaps(self, home: Mapping[int, int], rank: int) -> list[int]:
        """Return the ns before each chunk that needs nothing from another rank."""
        last = max(home)
        found = []
        for k, (stage, what, _) in enumerate(self.order[1:], start=1):
            source = stage - 1 if what == "forward" else stage + 1 if what in ("backward", "input") else -1
            if not 0 <= source <= last or home[source] == rank:
                found.append(self.begins[k] - self.ends[k - 1])
        return found


def _call(rows: pd.DataFrame) -> _Call:
    whole = rows[(rows["action"] == SCHEDULE).to_numpy()].iloc[0]
    rows = rows[(rows["action"] != SCHEDULE).to_numpy()]
    took: dict[Action, float] = {}
    begins: list[int] = []
    ends: list[int] = []
    for stage, which, what, start, dur in zip(
        rows["stage"], rows["microbatch"], rows["action"], rows["start_ns"], rows["dur_ns"], strict=True
    ):
        of = (int(stage), str(what) if what != "loss" else "forward", int(which))
        if what == "loss" and of in took:
            took[of] += float(dur)
            ends[-1] = int(start + dur)
            continue
        took[of] = float(dur)
        begins.append(int(start))
        ends.append(int(start + dur))
    edge = float(int(whole["dur_ns"]) - (ends[-1] - begins[0])) if begins else 0.0
    return _Call(float(whole["dur_ns"]), max(0.0, edge), tuple(took), took, tuple(begins), tuple(ends))
