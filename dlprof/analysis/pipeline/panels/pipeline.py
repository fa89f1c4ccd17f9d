"""One step of a pipeline."""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof.analysis import intervals as iv
from dlprof.analysis.panel import Picture
from dlprof.analysis.pipeline.pipeline import SCHEDULE
from dlprof.result import Panel

# A gap between two chunks below this share of the step is only their handing over.
LEAST_GAP = 1 / 500


def draw(bubbles: pd.DataFrame, pipeline_chunks: pd.DataFrame) -> list[Panel]:
    """Draw one step of the first pipeline, a lane a stage."""
    return [gantt(bubbles, pipeline_chunks, str(bubbles["ranks"].iloc[0]))]


def gantt(bubbles: pd.DataFrame, pipeline_chunks: pd.DataFrame, ranks: str) -> Panel:
    """Draw one step of the pipeline of some ranks, as `pipeline` has them: a lane a stage, and what it worked on."""
    mine = bubbles[bubbles["ranks"] == ranks]
    frame = pipeline_chunks
    frame = frame[frame["rank"].isin(mine["rank"]) & (frame["action"] != SCHEDULE) & (frame["call"] == 0)]
    # The first step that most ranks have; where there are many ranks, each writes fewer.
    step = int(str(frame.groupby("step")["rank"].nunique().idxmax()))
    frame = frame[frame["step"] == step].sort_values(["stage", "start_ns"], kind="stable")
    zero = int(frame["start_ns"].min())
    rows = tuple(
        (f"stage {stage} · rank {rank}", int(start) - zero, int(dur), str(which) if which >= 0 else action, str(action))
        for stage, rank, start, dur, which, action in zip(
            frame["stage"],
            frame["rank"],
            frame["start_ns"],
            frame["dur_ns"],
            frame["microbatch"],
            frame["action"],
            strict=True,
        )
    )
    rows += _idle(frame, zero)
    count = bubbles["ranks"].nunique()
    note = f"One of {count} pipelines that run side by side." if count > 1 else ""
    schedule = str(mine["schedule"].iloc[0]).removeprefix("Schedule")
    return Panel("timeline", f"Pipeline, {schedule}: the micro-batches of step {step}", rows, unit="ns", note=note)


def _idle(frame: pd.DataFrame, zero: int) -> tuple[tuple[str, int, int, str, str], ...]:
    """Return what is between chunks: where a rank works on none of its stages, each of their lanes has its bubble."""
    frame = frame[frame["stage"] >= 0]
    end = int((frame["start_ns"] + frame["dur_ns"]).max())
    step = np.array([[zero, end]], dtype=np.int64)
    rows = []
    for rank, mine in frame.groupby("rank"):
        start = mine["start_ns"].to_numpy()
        left = iv.subtract(step, iv.union(start, start + mine["dur_ns"].to_numpy()))
        left = left[left[:, 1] - left[:, 0] >= LEAST_GAP * (end - zero)]
        for stage in sorted(mine["stage"].unique()):
            lane = f"stage {stage} · rank {rank}"
            rows += [(lane, int(a) - zero, int(b - a), "bubble", "pipeline_bubble") for a, b in left]
    return tuple(rows)


PICTURE = Picture(draw)
