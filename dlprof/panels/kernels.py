"""The kernels that take longest, and the copies of a step."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from dlprof.engine import Measured, MeasureFailed
from dlprof.errors import NotMeasured
from dlprof.measures.copies import copies, copy_table
from dlprof.measures.operators import MOST_KERNELS, UNITS, kernel_times
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
    frame = run.frame(kernel_times)
    ranks = frame["rank"].nunique()
    total = float(frame.drop_duplicates("rank")["total_ns"].sum())
    found: dict[str, _Kernel] = {}
    columns = ("name", "kind", "calls", "ns", "rank")
    for name, kind, calls, ns, rank in zip(*(frame[c].tolist() for c in columns), strict=True):
        mine = found.setdefault(name, _Kernel(kind))
        mine.calls += calls
        mine.by_rank[rank] = ns
    rows = []
    for name, kernel in sorted(found.items(), key=lambda item: -sum(item[1].by_rank.values()))[:MOST_KERNELS]:
        ns = sum(kernel.by_rank.values())
        slowest = max(kernel.by_rank, key=lambda r: kernel.by_rank[r])
        rows.append(
            (
                name,
                UNITS.get(kernel.kind, UNKNOWN),
                digits(round(kernel.calls / ranks, 1)),
                duration(ns / ranks),
                duration(ns / kernel.calls),
                percent(ns / total) if total else UNKNOWN,
                *([f"rank {slowest}, {duration(kernel.by_rank[slowest])}"] if ranks > 1 else []),
            )
        )
    note = "Of a traced step; tensor cores as the kernels' names tell."
    known = int(frame["kernels"].max())
    if known > len(rows):
        note += f" The longest {len(rows)} of {known:,} kernels."
    headings = ("kernel", "runs on", "calls", "time a step", "a call", "of all kernels", "most on")
    who = f"mean of {ranks} ranks" if ranks > 1 else f"rank {frame['rank'].iloc[0]}"
    return Panel("table", f"Kernels, {who}", tuple(rows), headings if ranks > 1 else headings[:-1], note=note)


@dataclass
class _Kernel:
    """What a kernel takes: its calls, added up over the ranks, and its time on each."""

    kind: str
    calls: float = 0.0
    by_rank: dict[int, float] = field(default_factory=dict)


def _copies(run: Measured) -> Panel:
    frame = run.frame(copies)
    if not len(frame):
        raise NotMeasured("nothing was copied")
    exposed = frame.groupby("rank")["exposed_ns"].sum()
    return copy_table(frame, int(str(exposed.idxmax())))


PICTURE = Picture((copies, kernel_times), draw)
