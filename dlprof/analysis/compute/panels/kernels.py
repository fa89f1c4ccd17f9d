"""The kernels that take longest, and the copies of a step."""

from __future__ import annotations

from contextlib import suppress

import pandas as pd

from dlprof.analysis.compute.kernel_names import UNITS
from dlprof.analysis.engine import Maybe, MeasureFailed
from dlprof.analysis.panel import Picture
from dlprof.errors import NotMeasured
from dlprof.result import Panel


def draw(
    heaviest_kernels: Maybe[pd.DataFrame], kernel_times: Maybe[pd.DataFrame], copies: Maybe[pd.DataFrame]
) -> list[Panel]:
    """List the kernels, as the mean of the ranks, and the copies of the rank whose are least hidden."""
    panels = []
    with suppress(NotMeasured, MeasureFailed):
        panels.append(_kernels(heaviest_kernels.get(), kernel_times.get()))
    with suppress(NotMeasured, MeasureFailed):
        panels.append(_copies(copies.get()))
    return panels


def _kernels(heaviest_kernels: pd.DataFrame, kernel_times: pd.DataFrame) -> Panel:
    here = kernel_times["rank"].unique()
    rows = tuple(
        (
            row["name"],
            UNITS.get(row["kind"]),
            *(row[c] for c in ("calls", "ns", "call_ns", "share")),
            *((row["most_on"], row["most_ns"]) if len(here) > 1 else ()),
        )
        for row in heaviest_kernels.to_dict("records")
    )
    note = (
        "Of a traced step; shares are of the time in all kernels. Only its name tells what a kernel multiplies on;"
        " – multiplies nothing."
    )
    known = int(heaviest_kernels["known"].iloc[0])
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


def _copies(copies: pd.DataFrame) -> Panel:
    if not len(copies):
        raise NotMeasured("nothing was copied")
    exposed = copies.groupby("rank")["exposed_ns"].sum()
    return copy_table(copies, int(str(exposed.idxmax())))


PICTURE = Picture(draw)
