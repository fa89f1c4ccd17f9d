"""The idle share of each rank of a pipeline."""

from __future__ import annotations

import math

from dlprof.engine import Measured, MeasureFailed
from dlprof.errors import NotMeasured
from dlprof.measures.pipeline import bubbles, simulated_bubbles
from dlprof.overview import MOST_RANKS, Picture
from dlprof.result import Panel
from dlprof.units import digits, duration, percent


def draw(run: Measured) -> list[Panel]:
    """Tell of each rank how large its bubble is, beside what its schedule leaves."""
    frame = run.frame(bubbles)
    try:
        simulated = run.frame(simulated_bubbles).set_index("rank")["simulated"].to_dict()
    except (NotMeasured, MeasureFailed):
        simulated = {}
    shown = frame.sort_values(["ranks", "rank"]).head(4 * MOST_RANKS)
    rows = tuple(
        (
            f"rank {row['rank']}",
            row["stages"],
            duration(row["busy_ns"]),
            duration(row["step_ns"]),
            percent(row["bubble"]),
            percent(simulated.get(row["rank"], math.nan)),
            percent(row["closed"]),
        )
        for row in shown.to_dict("records")
    )
    columns = ("", "stages", "at work", "of a step of", "bubble, measured", "of these stages", "of the schedule")
    first = frame.iloc[0]
    note = (
        f"{str(first['schedule']).removeprefix('Schedule')}, {first['microbatches']} micro-batches,"
        f" {digits(first['chunks'])} stage{'s' if first['chunks'] > 1 else ''} a rank. A bubble is the idle share of a"
        " step. Of these stages: as they would run with hand-over and launching for nothing, which the rest of the"
        " measured is. Of the schedule: were all stages alike, too."
    )
    if len(frame) > len(shown):
        note += f" The first {len(shown)} of {len(frame)} ranks."
    return [Panel("table", "Pipeline bubbles", rows, columns, note=note)]


PICTURE = Picture((bubbles, simulated_bubbles), draw)
