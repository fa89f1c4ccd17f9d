"""What one step computes, and which operators take its time."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pandas as pd

from dlprof.analysis.compute.peaks import device_peaks
from dlprof.analysis.engine import Job, Maybe
from dlprof.analysis.panel import Picture, cells
from dlprof.errors import NotMeasured
from dlprof.result import Panel
from dlprof.units import quantity, short, size


def draw(
    operator_flops: Maybe[pd.DataFrame],
    heaviest_operators: Maybe[pd.DataFrame],
    operators: Maybe[pd.DataFrame],
    job: Job,
) -> list[Panel]:
    """Draw the floating-point operations of one step, a bar an operator, and a table of the heaviest operators."""
    panels = []
    with suppress(NotMeasured):
        panels.append(_flops(operator_flops.get()))
    with suppress(NotMeasured):
        panels.append(_heaviest(heaviest_operators.get(), operators.get(), job))
    return panels


def _flops(operator_flops: pd.DataFrame) -> Panel:
    ranks = operator_flops["rank"].nunique()
    named = operator_flops["operator"].str.removeprefix("aten::") + " · " + operator_flops["dtype"]
    sums = operator_flops.groupby(named, sort=False)["flops"].sum().sort_values(ascending=False, kind="stable")
    rows = tuple((str(name), float(n) / ranks) for name, n in sums.items())
    note = "Counted in one step that no time is taken from; two floating-point operations a multiplication."
    return Panel("bars", "What one step computes, by operator", rows, unit="FLOP", note=note)


def _heaviest(heaviest_operators: pd.DataFrame, operators: pd.DataFrame, job: Job) -> Panel:
    """Return the roofline as a table: what each of the heaviest operators computes, moves and is bound by."""
    frame = heaviest_operators
    frame = frame.assign(gflop=frame["flops"] / 1e9, tflop_s=frame["rate"] / 1e12)
    here = operators["rank"].unique()
    rows = tuple(
        (
            " ".join(filter(None, (short(row["operator"].removeprefix("aten::"), 80), _shape(row)))),
            row["dtype"] or None,
            row["calls"],
            row["ns"],
            row["gflop"],
            row["tflop_s"],
            row["bytes"],
            row["bound"] or None,
            *((row["most_on"], row["most_ns"]) if len(here) > 1 else ()),
        )
        for row in cells(frame).to_dict("records")
    )
    rank = int(here[0])
    device, peaks, bandwidth = device_peaks(job.facts[rank], job.trace_facts[rank])
    tops = ", ".join(f"{quantity(peak, 'FLOP')}/s in {precision}" for precision, peak in peaks.items())
    known = f"{device} computes {tops} and moves {size(bandwidth)}/s at most (its data sheet)." if peaks else ""
    note = (
        "Time a traced step in the kernels that it launched, on a CPU in itself; bound by what takes longer at the"
        f" device's peaks, or by launching where a kernel takes less than 10 µs. {known}"
    ).strip()
    columns = ("operator, shapes", "type", "calls", "time a step_ns", "GFLOP", "TFLOP/s", "moves_bytes", "bound by")
    most = ("most on rank", "there_ns") if len(here) > 1 else ()
    who = f"mean of {len(here)} ranks" if len(here) > 1 else f"rank {rank}"
    title = f"The heaviest operators of a step, {who}"
    return Panel("table", title, rows, (*columns, *most), note=note)


def _shape(row: Mapping[Any, Any]) -> str:
    return str(row["shape"]) or (f"of {row['shapes']} shapes" if row["shapes"] > 1 else "")


PICTURE = Picture(draw)
