"""What one step computes, and which operators take its time."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field

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
    rank, ranks = int(frame["rank"].iloc[0]), frame["rank"].nunique()
    rows = []
    for (name, dtype, shape), op in sorted(_by_operator(frame).items(), key=lambda item: -item[1].ns)[:HEAVIEST]:
        shape = shape or (f"of {len(op.shapes)} shapes" if len(op.shapes) > 1 else "")
        flops, moved = op.flops / ranks, op.moved / ranks
        slowest = max(op.by_rank, key=lambda r: op.by_rank[r])
        rows.append(
            (
                " ".join((name.removeprefix("aten::")[:80], *([shape] if shape else []))),
                dtype or UNKNOWN,
                digits(op.calls / ranks),
                duration(op.ns / ranks),
                UNKNOWN if math.isnan(flops) else quantity(flops, "FLOP"),
                UNKNOWN if math.isnan(flops) else f"{quantity(op.flops / op.ns * 1e9, 'FLOP')}/s",
                UNKNOWN if math.isnan(moved) else size(moved),
                next(iter(op.bounds)) or UNKNOWN if len(op.bounds) == 1 else UNKNOWN,
                *([f"rank {slowest}, {duration(op.by_rank[slowest])}"] if ranks > 1 else []),
            )
        )
    device, peaks, bandwidth = device_peaks(run.facts[rank], run.trace_facts[rank])
    tops = ", ".join(f"{quantity(peak, 'FLOP')}/s in {precision}" for precision, peak in peaks.items())
    known = f"{device} computes {tops} and moves {size(bandwidth)}/s at most (its data sheet)." if peaks else ""
    note = (
        "Time a traced step in the kernels that it launched, on a CPU in itself; bound by what takes longer at the"
        f" device's peaks, or by launching where a kernel takes less than 10 µs. {known}"
    ).strip()
    columns = ("operator, shapes", "type", "calls", "time a step", "computes", "rate", "moves", "bound by", "most on")
    who = f"mean of {ranks} ranks" if ranks > 1 else f"rank {rank}"
    title = f"The heaviest operators of a step, {who}"
    return Panel("table", title, tuple(rows), columns if ranks > 1 else columns[:-1], note=note)


@dataclass
class _Operator:
    """What an operator takes, added up over the ranks; what one of them does not know is not known (NaN)."""

    calls: float = 0.0
    ns: float = 0.0
    flops: float = 0.0
    moved: float = 0.0
    bounds: set[str] = field(default_factory=set)
    shapes: set[str] = field(default_factory=set)
    by_rank: dict[int, float] = field(default_factory=dict)


def _by_operator(frame: pd.DataFrame) -> dict[tuple[str, str, str], _Operator]:
    """Add up by operator, type and shapes; among shapes that its time was only shared out to, it is one ("")."""
    found: dict[tuple[str, str, str], _Operator] = {}
    columns = ("operator", "dtype", "shape", "shared", "calls", "ns", "flops", "bytes", "bound", "rank")
    for name, dtype, shape, shared, calls, ns, flops, moved, bound, rank in zip(
        *(frame[c].tolist() for c in columns), strict=True
    ):
        op = found.setdefault((name, dtype, "" if shared else shape), _Operator())
        op.calls += calls
        op.ns += ns
        op.flops += flops
        op.moved += moved
        op.bounds.add(bound)
        op.shapes.add(shape)
        op.by_rank[rank] = op.by_rank.get(rank, 0.0) + ns
    return found


PICTURE = Picture((operator_flops, operators), draw)
