"""The idle share of each rank of a pipeline, and how long its stages take."""

from __future__ import annotations

import pandas as pd

from dlprof.analysis.engine import Maybe, MeasureFailed
from dlprof.analysis.panel import MOST_RANKS, Picture, rows
from dlprof.errors import NotMeasured
from dlprof.result import Panel
from dlprof.units import count, digits, duration

_MOST_ROWS = 4 * MOST_RANKS

# What idle time comes from, and its word.
_PARTS = {
    "schedule_ns": "schedule_ns",
    "imbalance_ns": "imbalance_ns",
    "communication_ns": "handing over_ns",
    "launch_ns": "launching_ns",
}

_SHARES = {
    "bubble": "bubble_share",
    "simulated": "simulated_share",
    "scheduled": "even stages_share",
    "closed": "formula_share",
}


def draw(bubbles: pd.DataFrame, stage_lengths: Maybe[pd.DataFrame]) -> list[Panel]:
    """Tabulate how large each rank's bubble is and what it comes from, and how long each stage takes."""
    frame = bubbles.sort_values(["ranks", "rank"])
    shown = frame.head(_MOST_ROWS)
    table = shown.assign(idle_ns=shown["step_ns"] * shown["bubble"])[["rank", "idle_ns", *_PARTS, *_SHARES]]
    columns = ("rank", "idle_ns", *_PARTS.values(), *_SHARES.values())
    first = frame.iloc[0]
    note = (
        f"{str(first['schedule']).removeprefix('Schedule')}, {count(int(first['microbatches']), 'micro-batch')},"
        f" {count(int(first['chunks']), 'stage')} a rank, a step of {duration(first['step_ns'])}. What is idle of it is"
        " the sum of the four beside it; a stage longer than the others stands less idle for it, and its imbalance is"
        " negative. The bubble is the idle share: measured; simulated with the measured chunks, launching and handing"
        " over for nothing; the same with stages and micro-batches alike; by the formula of the schedule."
    )
    if len(frame) > len(shown):
        note += f" The first {len(shown)} of {len(frame)} ranks."
    return [Panel("table", "Pipeline bubbles", rows(table), columns, note=note), *_stages(stage_lengths)]


def _stages(stage_lengths: Maybe[pd.DataFrame]) -> list[Panel]:
    try:
        frame = stage_lengths.get()
    except (NotMeasured, MeasureFailed):
        return []
    frame = frame[frame["ranks"] == frame["ranks"].iloc[0]]
    mean = float(frame["stage_ns"].mean())
    stages = tuple(
        (
            *(row[c] for c in ("stage", "rank", "forward_ns", "backward_ns")),
            row["stage_ns"] / mean if mean else None,
        )
        for row in frame.head(_MOST_ROWS).to_dict("records")
    )
    columns = ("stage", "rank", "forward_ns", "backward_ns", "of the mean stage_times")
    slowdown = digits(float(frame["slowdown"].iloc[0]))
    note = f"The mean of a micro-batch. Replayed, the step is {slowdown} × what even stages would make it."
    if len(frame) > _MOST_ROWS:
        note += f" The first {_MOST_ROWS} of {len(frame)} stages."
    return [Panel("table", "Pipeline stages", stages, columns, note=note)]


PICTURE = Picture(draw)
