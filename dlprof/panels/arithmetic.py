"""What one step computes, and which operators take its time."""

from __future__ import annotations

import math
from contextlib import suppress

import numpy as np
import pandas as pd

from dlprof.engine import Measured
from dlprof.errors import NotMeasured
from dlprof.measures.arithmetic import device_peaks, operator_flops
from dlprof.measures.operators import operators
from dlprof.overview import Picture
from dlprof.result import Panel
from dlprof.units import UNKNOWN, digits, duration, quantity, size

HEAVIEST = 30


def draw(run: Measured) -> list[Panel]:
    """Draw the floating-point operations of one step, a bar an operator, and a table of the heaviest operators."""
    panels = []
    for panel in (_flops, _heaviest):
        with suppress(NotMeasured):
            panels.append(panel(run))
    return panels


def _flops(run: Measured) -> Panel:
    frame = run.frame(operator_flops)
    ranks = frame["rank"].nunique()
    named = frame["operator"].str.removeprefix("aten::") + " · " + frame["dtype"]
    sums = frame.groupby(named, sort=False)["flops"].sum().sort_values(ascending=False, kind="stable")
    rows = tuple((str(name), float(n) / ranks) for name, n in sums.items())
    note = "Counted in one step that no time is taken from; two floating-point operations a multiplication."
    return Panel("bars", "What one step computes, by operator", rows, unit="FLOP", note=note)


def _heaviest(run: Measured) -> Panel:
    """Give the roofline as a table: what each of the heaviest operators computes, moves and is bound by."""
    frame = run.frame(operators)
    rank = int(frame["rank"].iloc[0])
    mine = _whole(frame[frame["rank"] == rank]).head(HEAVIEST)
    rows = tuple(
        (
            " ".join((str(name).removeprefix("aten::")[:80], *([str(shape)] if shape else []))),
            dtype or UNKNOWN,
            digits(float(calls)),
            duration(float(ns)),
            UNKNOWN if math.isnan(flops) else quantity(float(flops), "FLOP"),
            UNKNOWN if math.isnan(flops) else f"{quantity(float(flops) / float(ns) * 1e9, 'FLOP')}/s",
            UNKNOWN if math.isnan(moved) else size(float(moved)),
            bound or UNKNOWN,
        )
        for name, shape, dtype, calls, ns, flops, moved, bound in zip(
            *(mine[c] for c in ("operator", "shape", "dtype", "calls", "ns", "flops", "bytes", "bound")), strict=True
        )
    )
    name, peaks, bandwidth = device_peaks(run.facts[rank], run.trace_facts[rank])
    tops = ", ".join(f"{quantity(peak, 'FLOP')}/s in {precision}" for precision, peak in peaks.items())
    known = f"{name} computes {tops} and moves {size(bandwidth)}/s at most (its data sheet)." if peaks else ""
    note = (
        "Time a traced step in the kernels that it launched, on a CPU in itself; bound by what takes longer at the"
        f" device's peaks, or by launching where a kernel takes less than 10 µs. {known}"
    ).strip()
    columns = ("operator, shapes", "type", "calls", "time a step", "computes", "rate", "moves", "bound by")
    return Panel("table", f"The heaviest operators of a step, rank {rank}", rows, columns, note=note)


def _whole(frame: pd.DataFrame) -> pd.DataFrame:
    """Put together what was only shared out: an operator that met several shapes is one row."""
    parts = frame[frame["shared"]]
    sums = parts.groupby(["operator", "dtype"], as_index=False, sort=False).agg(
        {"calls": "sum", "ns": "sum", "flops": "sum", "bytes": "sum", "shape": "size", "bound": "first"}
    )
    bounds = parts.groupby(["operator", "dtype"], sort=False)["bound"].nunique().to_numpy()
    sums["shape"] = [f"of {number} shapes" for number in sums["shape"]]
    sums["bound"] = np.where(bounds > 1, "", sums["bound"])
    rows = pd.concat([frame[~frame["shared"]], sums], ignore_index=True)
    return rows.sort_values("ns", ascending=False, kind="stable", ignore_index=True)


PICTURE = Picture((operator_flops, operators), draw)
