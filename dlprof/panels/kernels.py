"""The kernels that take longest, and the copies of a step."""

from __future__ import annotations

from contextlib import suppress

from dlprof.engine import Measured, MeasureFailed
from dlprof.errors import NotMeasured
from dlprof.measures.copies import copies, copy_table
from dlprof.measures.operators import UNITS, kernel_times
from dlprof.overview import Picture
from dlprof.result import Panel
from dlprof.units import UNKNOWN, digits, duration, percent


def draw(run: Measured) -> list[Panel]:
    """List the kernels of the first rank that has any, and the copies of the rank whose are least hidden."""
    panels = []
    for panel in (_kernels, _copies):
        with suppress(NotMeasured, MeasureFailed):
            panels.append(panel(run))
    return panels


def _kernels(run: Measured) -> Panel:
    frame = run.frame(kernel_times)
    rank = int(frame["rank"].iloc[0])
    mine = frame[frame["rank"] == rank]
    rows = tuple(
        (
            row["name"],
            UNITS.get(row["kind"], UNKNOWN),
            digits(round(float(row["calls"]), 1)),
            duration(row["ns"]),
            duration(row["ns"] / row["calls"]),
            percent(row["ns"] / row["total_ns"]) if row["total_ns"] else UNKNOWN,
        )
        for row in mine.to_dict("records")
    )
    note = "Of a traced step; tensor cores as the kernels' names tell."
    if int(mine["kernels"].iloc[0]) > len(rows):
        note += f" The longest {len(rows)} of {mine['kernels'].iloc[0]:,} kernels."
    columns = ("kernel", "runs on", "calls", "time a step", "a call", "of all kernels")
    return Panel("table", f"Kernels, rank {rank}", rows, columns, note=note)


def _copies(run: Measured) -> Panel:
    frame = run.frame(copies)
    if not len(frame):
        raise NotMeasured("nothing was copied")
    exposed = frame.groupby("rank")["exposed_ns"].sum()
    return copy_table(frame, int(str(exposed.idxmax())))


PICTURE = Picture((copies, kernel_times), draw)
