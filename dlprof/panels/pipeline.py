"""One step of a pipeline."""

from __future__ import annotations

from dlprof.engine import Measured
from dlprof.measures.pipeline import bubbles, pipeline_chunks
from dlprof.overview import Picture
from dlprof.result import Panel


def draw(run: Measured) -> list[Panel]:
    """Draw one step of the first pipeline, a lane a stage."""
    told = run.frame(bubbles)
    frame = run.frame(pipeline_chunks)
    frame = frame[frame["rank"].isin(told.loc[told["ranks"] == told["ranks"].iloc[0], "rank"])]
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
    more = told["ranks"].nunique() - 1
    note = f"One of {more + 1} pipelines that run side by side." if more else ""
    schedule = str(told["schedule"].iloc[0]).removeprefix("Schedule")
    return [Panel("timeline", f"Pipeline, {schedule}: the micro-batches of step {step}", rows, unit="ns", note=note)]


PICTURE = Picture((bubbles, pipeline_chunks), draw)
