"""One step of a pipeline, the idle share of each of its ranks, and how long its stages take."""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Frame, Maybe, maybe, needs
from dlprof.analysis.panel import MOST_RANKS, Picture, table
from dlprof.analysis.pipeline.chunks import SCHEDULE, pipeline_chunks
from dlprof.analysis.pipeline.pipeline_plans import schedules
from dlprof.analysis.pipeline.pipes import bubbles, stage_lengths
from dlprof.analysis.pipeline.schedules import short
from dlprof.analysis.timeline import host
from dlprof.result import Panel
from dlprof.units import count, duration

LEAST_GAP = 1 / 500  # of the step: a shorter gap between two chunks is only their handing over


_MOST_ROWS = 4 * MOST_RANKS


_BUBBLES = {c: c for c in ("rank", "idle_ns", "schedule_ns", "imbalance_ns")} | {
    "communication_ns": "handing over_ns",
    "launch_ns": "launching_ns",
    "bubble": "bubble_share",
    "simulated": "simulated_share",
    "scheduled": "even stages_share",
    "closed": "formula_share",
}


_HELD = {"schedule": "schedule", "idle": "idle_share", "activations": "activations_share"}
_HELD |= {"weights": "copies of the weights", "how": "how"}


_STAGES = {c: c for c in ("stage", "rank", "forward_ns", "backward_ns")} | {"relative": "of the mean stage_times"}


def draw(
    bubbles: Frame = needs(bubbles),
    pipeline_chunks: Maybe[Frame] = maybe(pipeline_chunks),
    stage_lengths: Maybe[Frame] = maybe(stage_lengths),
) -> list[Panel]:
    """Draw one step of the first pipeline, and tabulate every rank's bubble and its causes, and the stages' lengths."""
    chunks, stages = pipeline_chunks.or_none(), stage_lengths.or_none()
    return [
        *([] if chunks is None else [gantt(bubbles, chunks, bubbles["ranks"].iloc[0])]),
        _bubbles(bubbles),
        *([] if stages is None else [_stages(stages)]),
        _schedules(bubbles),
    ]


def gantt(bubbles: pd.DataFrame, pipeline_chunks: pd.DataFrame, ranks: str) -> Panel:
    """Draw one step of the pipeline of some ranks, as `pipeline` has them: a lane a stage, and what it worked on."""
    mine = bubbles[bubbles["ranks"] == ranks]
    frame = pipeline_chunks[pipeline_chunks["rank"].isin(mine["rank"])]
    frame = frame[(frame["action"] != SCHEDULE) & (frame["call"] == 0)]
    # The first step that most ranks have; where there are many ranks, each writes fewer.
    step = frame.groupby("step")["rank"].nunique().idxmax()
    frame = frame[frame["step"] == step].sort_values(["stage", "start_ns"], kind="stable")
    frame = frame.assign(start_ns=frame["start_ns"] - frame["start_ns"].min())
    columns = ["stage", "rank", "start_ns", "dur_ns", "microbatch", "action"]
    rows = [
        (_lane(*at), start, dur, str(which) if which >= 0 else action, action)
        for *at, start, dur, which, action in frame[columns].itertuples(index=False, name=None)
    ]
    pipelines = bubbles["ranks"].nunique()
    note = f"One of {pipelines} pipelines that run side by side." if pipelines > 1 else ""
    title = f"Pipeline, {short(mine['schedule'].iloc[0])}: the micro-batches of step {step}"
    return Panel("timeline", title, (*rows, *_idle(frame)), unit="ns", note=note)


def _idle(frame: pd.DataFrame) -> list[tuple[str, int, int, str, str]]:
    """Return what is between chunks: where a rank works on none of its stages, each of their lanes has its bubble."""
    frame = frame[frame["stage"] >= 0]
    end = int((frame["start_ns"] + frame["dur_ns"]).max())
    step, rows = np.array([[0, end]], dtype=np.int64), []
    for rank, mine in frame.groupby("rank"):
        gaps = [(a, b - a) for a, b in iv.subtract(step, host.cover(mine)).tolist() if b - a >= LEAST_GAP * end]
        for stage in np.unique(mine["stage"]):
            rows += [(_lane(stage, rank), *gap, "bubble", "pipeline_bubble") for gap in gaps]
    return rows


def _lane(stage: int, rank: object) -> str:
    return f"stage {stage} · rank {rank}"


def _bubbles(bubbles: pd.DataFrame) -> Panel:
    frame = bubbles.sort_values(["ranks", "rank"]).assign(idle_ns=bubbles["step_ns"] * bubbles["bubble"])
    first = frame.iloc[0]
    note = (
        f"{short(first['schedule'])}, {count(int(first['microbatches']), 'micro-batch')},"
        f" {count(int(first['chunks']), 'stage')} a rank, a step of {duration(first['step_ns'])}. The idle time is the"
        " sum of the four columns after it; a stage longer than the others is idle for less, and its imbalance is"
        " negative. The bubble is the idle share: measured; simulated with the measured chunks, launching and handing"
        " over for nothing; the same with stages and micro-batches alike; by the formula of the schedule."
        f"{_first(len(frame), 'ranks')}"
    )
    return table("Pipeline bubbles", frame, _BUBBLES, _MOST_ROWS, note)


def _stages(stage_lengths: pd.DataFrame) -> Panel:
    frame = stage_lengths[stage_lengths["ranks"] == stage_lengths["ranks"].iloc[0]]
    frame = frame.assign(relative=frame["stage_ns"] / (frame["stage_ns"].mean() or np.nan))
    saved = max(0.0, float(frame["saved_ns"].iloc[0]))
    note = f"The mean of a micro-batch. Replayed with even stages, the step would be {duration(saved)} shorter."
    return table("Pipeline stages", frame, _STAGES, _MOST_ROWS, note + _first(len(frame), "stages"))


def _schedules(bubbles: pd.DataFrame) -> Panel:
    first = bubbles.iloc[0]
    ranks, microbatches = int(first["size"]), int(first["microbatches"])
    note = (
        "Of stages alike, a backward pass twice as long as the forward pass, and handing over for nothing. Activations:"
        " the most that a rank holds, as a share of what its layers leave of a whole batch; a schedule with several"
        " stages a rank has two here. Replayed from the grid that torch runs; closed forms are Li and Hoefler's"
        " (Chimera, 2021) of schedules that torch does not run."
    )
    title = f"What schedules leave idle and hold, {count(ranks, 'rank')} and {count(microbatches, 'micro-batch')}"
    return table(title, schedules(ranks, microbatches), _HELD, note=note)


def _first(there: int, what: str) -> str:
    return f" The first {_MOST_ROWS} of {there} {what}." if there > _MOST_ROWS else ""


PICTURE = Picture(draw)
