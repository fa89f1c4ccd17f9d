"""Copies between host and device: how many, how large, from which memory, and how much of them nothing hides."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from dlprof import intervals as iv
from dlprof.engine import Measured, RankData, by_rank, per_rank
from dlprof.measures import device, host
from dlprof.measures.breakdown import part
from dlprof.measures.steps import timing
from dlprof.result import Panel
from dlprof.units import UNKNOWN, duration, size

# Scalars (a loss, a counter) are copied in a few bytes; what they cost is a wait, not a copy.
TINY_BYTES = 4_096


@per_rank
def copies(rank: RankData) -> pd.DataFrame:
    """Give the copies of the steady traced steps, one row a direction and host memory, per mean step.

    Columns: copy, memory, count, bytes (−1: the trace does not say), copy_ns, exposed_ns; the tiny ones left out.
    Exposed time is exclusive: two copies at once count once, for the row that comes first. Raises NotMeasured where
    the trace holds no work of a device.
    """
    sets = device.device_sets(rank)
    t = timing(rank)
    n = len(t.windows)
    within = iv.merge(t.windows)
    work = device.device_work(rank)
    start = work["start_ns"].to_numpy()
    inside = np.zeros(len(work), dtype=bool)
    for s, e in within:
        inside[np.searchsorted(start, s) : np.searchsorted(start, e)] = True
    size = work["bytes"].to_numpy()
    counts = inside & host.is_kind(work, "copy") & ((size < 0) | (size > TINY_BYTES))
    chosen = work[counts]
    exposed = iv.intersect(sets.exposed_copy, within)
    rows = []
    for (direction, memory), group in chosen.groupby(["copy", "memory"], observed=True):
        covered = host.cover(group)
        mine = iv.intersect(exposed, covered)
        exposed = iv.subtract(exposed, mine)
        known = group["bytes"].to_numpy()
        rows.append(
            {
                "copy": str(direction),
                "memory": str(memory),
                "count": len(group) / n,
                "bytes": float(known.sum()) / n if (known >= 0).all() else -1.0,
                "copy_ns": float(group["dur_ns"].sum()) / n,
                "exposed_ns": iv.total(mine) / n,
            }
        )
    columns = ["copy", "memory", "count", "bytes", "copy_ns", "exposed_ns"]
    return pd.DataFrame(rows, columns=columns)


def hideable(run: Measured, exposed: Mapping[int, float]) -> dict[int, float]:
    """Bound exposed copy time (rank → ns a step) by the computation behind which it could be hidden.

    That is the step's, less what hides other copies already: they share the link.
    """
    computation = part(run, "computation")
    frame = run.frame(copies)
    hidden = by_rank(frame.assign(hidden_ns=(frame["copy_ns"] - frame["exposed_ns"]).clip(lower=0.0)), "hidden_ns")
    return {r: min(ns, max(0.0, computation.get(r, 0.0) - hidden.get(r, 0.0))) for r, ns in exposed.items()}


def copy_table(frame: pd.DataFrame, rank: int) -> Panel:
    """Show the copies of one rank, the most exposed first."""
    mine = frame[frame["rank"] == rank].sort_values("exposed_ns", ascending=False)
    rows = tuple(
        (
            c,
            m or UNKNOWN,
            round(float(n), 1),
            size(b) if b >= 0 else UNKNOWN,
            duration(t),
            duration(e),
            f"{size(b / t * 1e9)}/s" if b > 0 and t > 0 else UNKNOWN,
        )
        for c, m, n, b, t, e in zip(
            mine["copy"], mine["memory"], mine["count"], mine["bytes"], mine["copy_ns"], mine["exposed_ns"], strict=True
        )
    )
    columns = ("way", "host memory", "copies", "bytes", "time", "exposed", "rate")
    return Panel("table", f"Copies of a mean step on rank {rank}", rows, columns)
