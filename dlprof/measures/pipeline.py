"""How long the stages of a pipeline stand idle: measured, and as the schedule alone would have it.

The bubble is the idle share of one synchronous step. The step begins with the first stage's first forward, and its last
backward ends it, so its length is that of schedule.step() on the rank that holds the first stage: another rank's own
call may begin early and end early. Bubbles are told as shares of the step; papers also give them ÷ the time without,
under the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from dlprof import intervals as iv
from dlprof.engine import Measured, RankData, across_ranks, per_rank
from dlprof.errors import NotMeasured
from dlprof.measures.steps import light_steps, standard_error

# Schedules that fill and drain once a step: (p − 1) of v·m + p − 1 slots are idle on each of p ranks, with v chunks a
# rank and m micro-batches (Huang et al., GPipe, 2019; Narayanan et al., Megatron-LM, 2021).
_FILL_AND_DRAIN = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleLoopedBFS")

# Those that split the backward fill all but the first forwards: p − 1 forwards of a chunk are left in a step that ends
# for all ranks at once (Qi et al., Zero Bubble Pipeline Parallelism, 2023, whose own figure lets optimizers run early).
_SPLIT_BACKWARD = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")

# Of so many steps the chunks travel, so that all ranks have one in common.
_STEPS_SHOWN = 8
_MOST_ROWS = 4_000

SCHEDULE = "schedule"


def closed_form(schedule: str, ranks: int, microbatches: int, chunks: int, forward_share: float) -> float:
    """Give the bubble that a schedule has with stages alike and hand-over for nothing; NaN: not known of it.

    `forward_share`: one chunk's forward pass ÷ all of a rank's work in a step.
    """
    if schedule in _FILL_AND_DRAIN:
        return (ranks - 1) / (chunks * microbatches + ranks - 1)
    if schedule in _SPLIT_BACKWARD:
        idle = (ranks - 1) * forward_share
        return idle / (1 + idle)
    return float("nan")


def with_twice_the_microbatches(schedule: str, ranks: int, microbatches: int, chunks: int, share: float) -> float:
    """Give the closed form with twice the micro-batches, each of half the size."""
    return closed_form(schedule, ranks, 2 * microbatches, chunks, share / 2)


def _told(rank: RankData) -> Mapping[str, Any]:
    told = rank.facts.get("pipeline")
    if not rank.has("chunks") or not isinstance(told, Mapping):
        rank.table("chunks")  # says why, where nothing was recorded
        raise NotMeasured("no step of a pipeline schedule was recorded")
    return told


def _steady(rank: RankData) -> pd.DataFrame:
    """Give the chunks of the steady steps."""
    chunks = rank.table("chunks")
    steps = rank.once(light_steps)
    steady = steps.loc[steps["steady"], "step"].to_numpy()
    return chunks[np.isin(chunks["step"].to_numpy(), steady)]


@per_rank
def pipeline(rank: RankData) -> pd.DataFrame:
    """Give one row of the steady calls of schedule.step(): which schedule, and the mean call in ns.

    Columns: schedule, microbatches, stages and ranks (as text, ", " between), first_stage (this rank holds it), chunks
    (a rank), calls, calls_a_step (of training), dur_ns, busy_ns (inside chunks), noise_ns (standard error of what is
    left), and the mean of one forward_ns, backward_ns, input_ns, weight_ns, loss_ns, reduce_ns; NaN: none.
    """
    told = _told(rank)
    frame = _steady(rank)
    calls = frame[(frame["action"] == SCHEDULE).to_numpy()]
    if not len(calls):
        raise NotMeasured("no steady step ran the pipeline")
    one = frame.groupby("action", observed=True)["dur_ns"].mean()
    idle = (calls["dur_ns"] - calls["busy_ns"]).to_numpy(dtype=float)
    actions = ("forward", "backward", "input", "weight", "loss", "reduce")
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
            **{f"{a}_ns": [float(one.get(a, np.nan))] for a in actions},
        }
    )


@per_rank
def pipeline_chunks(rank: RankData) -> pd.DataFrame:
    """Give the chunks of a few steady steps, one by one: step, stage, microbatch, action, start_ns, dur_ns."""
    _told(rank)
    frame = _steady(rank)
    frame = frame[(frame["action"] != SCHEDULE).to_numpy()]
    shown = frame[frame["step"].isin(frame["step"].unique()[:_STEPS_SHOWN])].iloc[:_MOST_ROWS]
    if not len(shown):
        raise NotMeasured("no chunk of a steady step was recorded")
    columns = ["step", "stage", "microbatch", "action", "start_ns", "dur_ns"]
    return shown[columns].astype({"action": "str"})


@across_ranks(pipeline)
def bubbles(run: Measured) -> pd.DataFrame:
    """Give the bubble of each rank: the columns of `pipeline` and step_ns, bubble, closed, doubled.

    `step_ns` is the synchronous step of the rank's pipeline; where the rank with the first stage is not here, its own.
    `bubble` is the idle share of it. `closed` is the closed form, `doubled` that with twice the micro-batches; NaN
    where none is known.
    """
    frame = run.frame(pipeline)
    first = frame[frame["first_stage"]].set_index("ranks")["dur_ns"]
    step = frame["ranks"].map(first.groupby(level=0).first()).fillna(frame["dur_ns"])
    busy = frame.groupby("ranks")["busy_ns"].transform("mean")
    share = frame.groupby("ranks")["forward_ns"].transform("mean") / busy
    shape = list(zip(frame["schedule"], frame["size"], frame["microbatches"], frame["chunks"], share, strict=True))
    return frame.assign(
        step_ns=step,
        bubble=(1 - frame["busy_ns"] / step).clip(lower=0.0),
        closed=[closed_form(*of) for of in shape],
        doubled=[with_twice_the_microbatches(*of) for of in shape],
    )


@across_ranks(bubbles, pipeline_chunks)
def simulated_bubbles(run: Measured) -> pd.DataFrame:
    """Give the bubble that each rank would have if handing over and launching took no time: rank, simulated.

    Every rank does its chunks in the order in which it did them, each as long as the mean of its stage and action, and
    as soon as what it needs is there. What is measured above that is handing over and launching; what that is above the
    closed form, stages that are not alike. NaN where a rank of the pipeline, or a step that all have, is missing.
    """
    told = run.frame(bubbles)
    chunks = run.frame(pipeline_chunks)
    parts = []
    for _, ranks in told.groupby("ranks"):
        mine = chunks[chunks["rank"].isin(ranks["rank"])]
        seen = mine.groupby("step")["rank"].nunique()
        common = seen.index[seen == ranks["size"].iloc[0]]
        ends = _replay(mine, int(common[0])) if len(common) else {}
        whole = max((end for end, _ in ends.values()), default=np.nan)
        busy = ranks["rank"].map({rank: work for rank, (_, work) in ends.items()})
        parts.append(pd.DataFrame({"rank": ranks["rank"], "simulated": (1 - busy / whole).astype(float)}))
    return pd.concat(parts, ignore_index=True)


def _replay(chunks: pd.DataFrame, step: int) -> dict[int, tuple[float, float]]:
    """Run a step's chunks again with mean lengths: rank → when it is through, and how long it worked; {}: it hangs."""
    took = chunks.groupby(["stage", "action"])["dur_ns"].mean().to_dict()
    one = chunks[chunks["step"] == step].sort_values("start_ns", kind="stable")
    left = {
        int(str(rank)): list(zip(of["stage"], of["microbatch"], of["action"], strict=True))[::-1]
        for rank, of in one.groupby("rank")
    }
    last = int(one["stage"].max())
    free = dict.fromkeys(left, 0.0)
    worked = dict.fromkeys(left, 0.0)
    ready: dict[tuple[int, int, str], float] = {}  # when a stage has sent a micro-batch on, or its gradients back
    while any(left.values()):
        before = sum(map(len, left.values()))
        for rank, todo in left.items():
            while todo:
                stage, which, action = todo[-1]
                way = {"forward": "on", "backward": "back", "input": "back"}.get(action, "")
                source = stage - 1 if way == "on" else stage + 1
                needs = bool(way) and 0 <= source <= last
                if needs and (source, which, way) not in ready:
                    break
                todo.pop()
                begin = max(free[rank], ready[source, which, way] if needs else 0.0)
                free[rank] = begin + took[stage, action]
                worked[rank] += took[stage, action]
                ready[stage, which, way] = free[rank]
        if sum(map(len, left.values())) == before:
            return {}
    return {rank: (free[rank], worked[rank]) for rank in left}


def idle_ns(rank: RankData) -> float:
    """Give the ns of the mean steady step that this rank's schedule.step() spends outside its chunks; 0: none known."""
    try:
        _told(rank)
    except NotMeasured:
        return 0.0
    frame = _steady(rank)
    calls = frame[(frame["action"] == SCHEDULE).to_numpy()]
    n = int(rank.once(light_steps)["steady"].sum())
    return float((calls["dur_ns"] - calls["busy_ns"]).clip(lower=0).sum()) / n if n else 0.0


def outside_chunks(rank: RankData) -> iv.Intervals:
    """Give the time inside a schedule.step() and outside its chunks, of the calls whose chunks were recorded."""
    if not rank.has("chunks"):
        return iv.EMPTY
    frame = rank.table("chunks")
    whole = (frame["action"] == SCHEDULE).to_numpy()
    detailed = np.isin(frame["step"].to_numpy(), frame["step"].to_numpy()[~whole])
    start = frame["start_ns"].to_numpy()
    end = start + frame["dur_ns"].to_numpy()
    calls = iv.union(start[whole & detailed], end[whole & detailed])
    return iv.subtract(calls, iv.union(start[~whole], end[~whole]))
