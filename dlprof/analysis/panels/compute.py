"""Panels of compute, as data that the page draws."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pandas as pd

from dlprof.analysis.compute.kernels import UNITS
from dlprof.analysis.compute.operators import (
    heaviest_kernels,
    heaviest_operators,
    of_ranks,
    operators,
    work,
)
from dlprof.analysis.compute.peaks import device_peaks
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, MeasureFailed, maybe, needs
from dlprof.analysis.memory.copies import copies
from dlprof.analysis.panel import Picture, table
from dlprof.errors import NotMeasured
from dlprof.result import Panel
from dlprof.units import quantity, short, size

_ARITHMETIC_COLUMNS = {
    "what": "operator, shapes",
    "dtype": "type",
    "calls": "calls",
    "ns": "time a step_ns",
    "gflop": "GFLOP",
    "tflop_s": "TFLOP/s",
    "bytes": "moves_bytes",
    "bound": "bound by",
}


def draw_arithmetic(
    heaviest_operators: Frame = needs(heaviest_operators), operators: Frame = needs(operators), job: Job = needs(JOB)
) -> list[Panel]:
    """Return the roofline as a table: what each of the heaviest operators computes, moves and is bound by."""
    frame, ranks = heaviest_operators, operators["rank"].unique().tolist()
    names = [short(name.removeprefix("aten::"), 80) for name in frame["operator"]]
    several = [f"of {n} shapes" if n > 1 else "" for n in frame["shapes"]]
    what = [" ".join(filter(None, (n, s or o))) for n, s, o in zip(names, frame["shape"], several, strict=True)]
    frame = frame.assign(what=what, gflop=frame["flops"] / 1e9, tflop_s=frame["rate"] / 1e12)
    device, peaks, bandwidth = device_peaks(job.facts[ranks[0]], job.trace_facts[ranks[0]])
    tops = ", ".join(f"{quantity(peak, 'FLOP')}/s in {precision}" for precision, peak in peaks.items())
    known = f"{device} computes {tops} and moves {size(bandwidth)}/s at most (its data sheet)." if peaks else ""
    note = (
        "Time in a traced step: of the kernels that it launched, on a CPU its own. Bound by what takes longer at the"
        f" device's peaks, or by launching where a kernel takes less than 10 µs. {known}"
    ).strip()
    who, most = of_ranks(ranks)
    return [
        table(
            f"The heaviest operators of a step, {who}", frame.replace("", np.nan), _ARITHMETIC_COLUMNS | most, note=note
        )
    ]


ARITHMETIC_PICTURE = Picture(draw_arithmetic)


_KERNELS_COLUMNS = {
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


def draw_kernels(
    heaviest_kernels: Maybe[Frame] = maybe(heaviest_kernels),
    work: Maybe[Frame] = maybe(work),
    copies: Maybe[Frame] = maybe(copies),
) -> list[Panel]:
    """List the kernels, as the mean of the ranks, and the copies of the rank with the least hidden ones."""
    panels = []
    with suppress(NotMeasured, MeasureFailed):
        ranks = work.get().loc[work.get()["kind"] == "kernel", "rank"].unique().tolist()
        panels.append(_kernels(heaviest_kernels.get(), ranks))
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
    return table(f"Kernels, {who}", frame, _KERNELS_COLUMNS | most, note=note)


def copy_table(copies: pd.DataFrame, rank: int) -> Panel:
    """List the copies of one rank, the most exposed first."""
    mine = copies[copies["rank"] == rank].sort_values("exposed_ns", ascending=False).replace("", np.nan)
    moved, took = mine["bytes"], mine["copy_ns"]
    mine = mine.assign(bytes=moved.where(moved >= 0), rate=(moved / took * 1e9).where((moved > 0) & (took > 0)))
    return table(f"Copies of a mean step on rank {rank}", mine, _COPY_COLUMNS)


KERNELS_PICTURE = Picture(draw_kernels)
