"""The kernels that take longest, and the copies of a step."""

from __future__ import annotations

from contextlib import suppress

from dlprof.engine import Measured, MeasureFailed
from dlprof.errors import NotMeasured
from dlprof.measures.copies import copies, copy_table
from dlprof.measures.heaviest import heaviest_kernels
from dlprof.measures.kernel_names import UNITS
from dlprof.measures.operators import kernel_times
from dlprof.overview import Picture
from dlprof.result import Panel
from dlprof.units import UNKNOWN, digits, duration, percent


def draw(run: Measured) -> list[Panel]:
    """List the kernels, as the mean of the ranks, and the copies of the rank whose are least hidden."""
    panels = []
    for panel in (_kernels, _copies):
        with suppress(NotMeasured, MeasureFailed):
            panels.append(panel(run))
    return panels


def _kernels(run: Measured) -> Panel:
    frame = run.frame(heaviest_kernels)
    here = run.frame(kernel_times)["rank"].unique()
    rows = tuple(
        (
            str(row["name"]),
            UNITS.get(row["kind"], UNKNOWN),
            digits(round(row["calls"], 1)),
            duration(row["ns"]),
            duration(row["call_ns"]),
            percent(row["share"]),
            *([f"rank {row['most_on']}, {duration(row['most_ns'])}"] if len(here) > 1 else []),
        )
        for row in frame.to_dict("records")
    )
    note = "Of a traced step. Only its name tells what a kernel multiplies on; – multiplies nothing."
    known = int(frame["known"].iloc[0])
    if known > len(rows):
        note += f" The longest {len(rows)} of {known:,} kernels."
    headings = ("kernel", "runs on", "calls", "time a step", "a call", "of all kernels", "most on")
    who = f"mean of {len(here)} ranks" if len(here) > 1 else f"rank {here[0]}"
    return Panel("table", f"Kernels, {who}", rows, headings if len(here) > 1 else headings[:-1], note=note)


def _copies(run: Measured) -> Panel:
    frame = run.frame(copies)
    if not len(frame):
        raise NotMeasured("nothing was copied")
    exposed = frame.groupby("rank")["exposed_ns"].sum()
    return copy_table(frame, int(str(exposed.idxmax())))


PICTURE = Picture((copies, heaviest_kernels, kernel_times), draw)
