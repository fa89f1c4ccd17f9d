"""The kernels and operators that take longest: their mean over the ranks, and the rank on which each takes most."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pandas as pd

from dlprof.analysis.compute.kernels import MOST_KERNELS
from dlprof.analysis.engine import across_ranks

MOST_OPERATORS = 30


@dataclass
class _Sum:
    """What a kernel or an operator takes, added up over the ranks; what one of them does not know is NaN."""

    calls: float = 0.0
    flops: float = 0.0
    moved: float = 0.0
    by_rank: dict[int, float] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)
    shapes: set[str] = field(default_factory=set)

    def add(self, rank: int, calls: float, ns: float, kind: str) -> None:
        """Take what one rank has."""
        self.calls += calls
        self.by_rank[rank] = self.by_rank.get(rank, 0.0) + ns
        self.kinds.add(kind)

    @property
    def ns(self) -> float:
        """The time on all ranks."""
        return sum(self.by_rank.values())

    def shared(self, ranks: int) -> dict[str, float]:
        """Return the mean of the ranks, and the one with most."""
        most = max(self.by_rank, key=lambda r: self.by_rank[r])
        return {
            "calls": self.calls / ranks,
            "ns": self.ns / ranks,
            "most_on": most,
            "most_ns": self.by_rank[most],
        }

    @property
    def kind(self) -> str:
        """What it is of one kind on all ranks; "" where they differ."""
        return next(iter(self.kinds)) if len(self.kinds) == 1 else ""


# Dictionaries: for a few hundred rows they take a tenth of what groups of a frame do.
@across_ranks
def heaviest_kernels(kernel_times: pd.DataFrame) -> pd.DataFrame:
    """Return the kernels that take longest, the longest first: name, kind, calls and ns (a step, mean of the ranks),
    call_ns (of one), share (of the time in all kernels), most_on (a rank), most_ns (there), and known, how many there
    are on a rank.
    """
    ranks = kernel_times["rank"].nunique()
    total = float(kernel_times.drop_duplicates("rank")["total_ns"].sum())
    found: dict[str, _Sum] = {}
    columns = ("name", "rank", "calls", "ns", "kind")
    for name, rank, calls, ns, kind in zip(*(kernel_times[c].tolist() for c in columns), strict=True):
        found.setdefault(name, _Sum()).add(rank, calls, ns, kind)
    longest = sorted(found.items(), key=lambda item: -item[1].ns)[:MOST_KERNELS]
    rows = [
        {"name": name, "kind": one.kind, "call_ns": one.ns / one.calls, "share": one.ns / total if total else 0.0}
        | one.shared(ranks)
        for name, one in longest
    ]
    return pd.DataFrame(rows).assign(known=int(kernel_times["kernels"].max()))


@across_ranks
def heaviest_operators(operators: pd.DataFrame) -> pd.DataFrame:
    """Return the operators that take longest, by dtype and shape, the longest first.

    Columns: operator, dtype, shape ("": of several, among which its time was only shared out, or not told), shapes (how
    many), calls and ns (a step, mean of the ranks), flops and bytes (likewise; NaN: not known), rate (FLOP/s), bound
    ("": not known, or not the same everywhere), most_on (a rank), most_ns (there).
    """
    ranks = operators["rank"].nunique()
    found: dict[tuple[str, str, str], _Sum] = {}
    columns = ("operator", "dtype", "shape", "shared", "rank", "calls", "ns", "bound", "flops", "bytes")
    for name, dtype, shape, shared, rank, calls, ns, bound, flops, moved in zip(
        *(operators[c].tolist() for c in columns), strict=True
    ):
        one = found.setdefault((name, dtype, "" if shared else shape), _Sum())
        one.add(rank, calls, ns, bound)
        one.flops += flops
        one.moved += moved
        one.shapes.add(shape)
    longest = sorted(found.items(), key=lambda item: -item[1].ns)[:MOST_OPERATORS]
    rows = [
        {"operator": name, "dtype": dtype, "shape": shape, "shapes": len(one.shapes), "bound": one.kind}
        | {"flops": one.flops / ranks, "bytes": one.moved / ranks}
        | {"rate": one.flops / one.ns * 1e9 if one.ns else math.nan}
        | one.shared(ranks)
        for (name, dtype, shape), one in longest
    ]
    return pd.DataFrame(rows)
