"""The kernels that take longest, and the copies of a step."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pandas as pd

from dlprof.analysis.compute.kernels import UNITS
from dlprof.analysis.compute.operators import heaviest_kernels, kernels_of, of_ranks, work
from dlprof.analysis.engine import Frame, Maybe, MeasureFailed, maybe
from dlprof.analysis.memory.copies import copies
from dlprof.analysis.panel import Picture, table
from dlprof.errors import NotMeasured
from dlprof.result import Panel

_COLUMNS = {
    "name": "kernel",
    "unit": "runs on",
    "calls": "calls",
    "ns": "time a step_ns",
    "call_ns": "a call_ns",
    "share": "share",
}

_COPY_COLUMNS = {
    "copy": "way",
    "memory": "host memory",
    "count": "copies",
    "bytes": "size_bytes",
    "copy_ns": "time_ns",
    "exposed_ns": "exposed_ns",
    "rate": "rate per second_bytes",
}


def draw(
    heaviest_kernels: Maybe[Frame] = maybe(heaviest_kernels),
    work: Maybe[Frame] = maybe(work),
    copies: Maybe[Frame] = maybe(copies),
) -> list[Panel]:
    """List the kernels, as the mean of the ranks, and the copies of the rank whose are least hidden."""
    panels = []
    with suppress(NotMeasured, MeasureFailed):
        panels.append(_kernels(heaviest_kernels.get(), kernels_of(work.get())["rank"].unique().tolist()))
    with suppress(NotMeasured, MeasureFailed):
        exposed = copies.get().groupby("rank")["exposed_ns"].sum()
        panels += [copy_table(copies.get(), int(str(exposed.idxmax())))] if len(exposed) else []
    return panels


def _kernels(heaviest_kernels: pd.DataFrame, ranks: list[int]) -> Panel:
    note = (
        "Of a traced step; shares are of the time in all kernels. What a kernel multiplies on is known from its name"
        " alone; –: it multiplies nothing."
    )
    known = int(heaviest_kernels["known"].iloc[0])
    if known > len(heaviest_kernels):
        note += f" The longest {len(heaviest_kernels)} of {known:,} kernels."
    who, most = of_ranks(ranks)
    frame = heaviest_kernels.assign(unit=heaviest_kernels["kind"].map(UNITS))
    return table(f"Kernels, {who}", frame, _COLUMNS | most, note=note)


def copy_table(copies: pd.DataFrame, rank: int) -> Panel:
    """List the copies of one rank, the most exposed first."""
    mine = copies[copies["rank"] == rank].sort_values("exposed_ns", ascending=False).replace("", np.nan)
    moved, took = mine["bytes"], mine["copy_ns"]
    mine = mine.assign(bytes=moved.where(moved >= 0), rate=(moved / took * 1e9).where((moved > 0) & (took > 0)))
    return table(f"Copies of a mean step on rank {rank}", mine, _COPY_COLUMNS)


PICTURE = Picture(draw)
