"""What one step computes."""

from __future__ import annotations

from dlprof.engine import Measured
from dlprof.measures.arithmetic import operator_flops
from dlprof.overview import Picture
from dlprof.result import Panel


def draw(run: Measured) -> list[Panel]:
    """Draw the floating-point operations of one step, a bar an operator."""
    frame = run.frame(operator_flops)
    ranks = frame["rank"].nunique()
    named = frame["operator"].str.removeprefix("aten::") + " · " + frame["dtype"]
    sums = frame.groupby(named, sort=False)["flops"].sum().sort_values(ascending=False, kind="stable")
    rows = tuple((str(name), float(n) / ranks) for name, n in sums.items())
    note = "Counted in one step that no time is taken from; two floating-point operations a multiplication."
    return [Panel("bars", "What one step computes, by operator", rows, unit="FLOP", note=note)]


PICTURE = Picture((operator_flops,), draw)
