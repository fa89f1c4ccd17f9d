"""The kernels that take longest, and the copies of a step."""

from __future__ import annotations

from contextlib import suppress

import pandas as pd

from dlprof.engine import Measured, MeasureFailed
from dlprof.errors import NotMeasured
from dlprof.measures.copies import copies
from dlprof.measures.heaviest import heaviest_kernels
from dlprof.measures.kernel_names import UNITS
from dlprof.measures.operators import kernel_times
from dlprof.overview import Picture
from dlprof.result import Panel


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
            row["name"],
            UNITS.get(row["kind"]),
            *(row[c] for c in ("calls", "ns", "call_ns", "share")),
            *((row["most_on"], row["most_ns"]) if len(here) > 1 else ()),
        )
        for row in frame.to_dict("records")
    )
    note = (
        "Of a traced step; shares are of the time in all kernels. Only its name tells what a kernel multiplies on;"
        " – multiplies nothing."
    )
    known = int(frame["known"].iloc[0])
    if known > len(rows):
        note += f" The longest {len(rows)} of {known:,} kernels."
    headings = ("kernel", "runs on", "calls", "time a step_ns", "a call_ns", "share")
    most = ("most on rank", "there_ns") if len(here) > 1 else ()
    who = f"mean of {len(here)} ranks" if len(here) > 1 else f"rank {here[0]}"
    return Panel("table", f"Kernels, {who}", rows, (*headings, *most), note=note)


def copy_table(frame: pd.DataFrame, rank: int) -> Panel:
    """List the copies of one rank, as `copies` has them, the most exposed first."""
    mine = frame[frame["rank"] == rank].sort_values("exposed_ns", ascending=False)
    rows = tuple(
        (
            str(way),
            str(memory) or None,
            float(n),
            float(moved) if moved >= 0 else None,
            float(took),
            float(exposed),
            float(moved / took * 1e9) if moved > 0 and took > 0 else None,
        )
        for way, memory, n, moved, took, exposed in zip(
            *(mine[c] for c in ("copy", "memory", "count", "bytes", "copy_ns", "exposed_ns")), strict=True
        )
    )
    columns = ("way", "host memory", "copies", "size_bytes", "time_ns", "exposed_ns", "rate per second_bytes")
    return Panel("table", f"Copies of a mean step on rank {rank}", rows, columns)


def _copies(run: Measured) -> Panel:
    frame = run.frame(copies)
    if not len(frame):
        raise NotMeasured("nothing was copied")
    exposed = frame.groupby("rank")["exposed_ns"].sum()
    return copy_table(frame, int(str(exposed.idxmax())))


PICTURE = Picture((copies, heaviest_kernels, kernel_times), draw)
