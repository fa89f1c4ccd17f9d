"""Copies between host and device: how many, how large, from which memory, and how much of them nothing hides."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import intervals as iv
from dlprof.engine import Measured, RankData, by_rank, per_rank
from dlprof.measures.breakdown import part
from dlprof.measures.peaks import PCIE_REACHED, device_of, host_link
from dlprof.measures.syncs import copying_waits
from dlprof.timeline import device, host
from dlprof.timeline.steps import launched_within, timing
from dlprof.timeline.what_if import LITTLE, WhatIf, what_if

# Scalars (a loss, a counter) are copied in a few bytes; what they cost is a wait, not a copy.
TINY_BYTES = 4_096


@per_rank
def copies(rank: RankData) -> pd.DataFrame:
    """Return the copies of the steady traced steps, one row a direction and host memory, per mean step.

    Columns: copy, memory, count, bytes (−1: the trace does not say), copy_ns, exposed_ns; the tiny ones left out.
    Exposed time is exclusive: two copies at once count once, for the row that comes first. Raises NotMeasured where
    the trace holds no work of a device.
    """
    sets = device.device_sets(rank)
    t = timing(rank)
    n = len(t.windows)
    within = iv.merge(t.windows)
    work = device.device_work(rank)
    inside = launched_within(rank) >= 0
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


# What is taken of a copy, as a change makes it: its memory pinned and nobody waiting for it; or put on a stream of its
# own, one step ahead; or not made at all.
PINNED, AHEAD, GONE = "pinned", "ahead", "gone"

# A copy tells the rate of its link from here on: smaller ones take as long to start as to run.
_RATE_BYTES = 1 << 20


@per_rank
def copy_gains(rank: RankData) -> pd.DataFrame:
    """Return how much shorter the mean steady step would be with changed copies, ns: copy, memory, change, gain_ns.

    Of copies from pageable memory to the device `pinned`: as fast as the link is for pinned memory (where neither the
    trace nor the GPU's name tells that, as fast as now), and not waited for. Of all others `ahead`: they run beside
    computation on a stream of their own; or, within the device and on the way back, `gone`. The tiny ones left out.
    Raises NotMeasured where the trace cannot be replayed.
    """
    asked = what_if(rank)
    replay, work = asked.replay, device.device_work(rank)
    rows = replay.rows
    size = work["bytes"].to_numpy()[rows]
    counts = host.is_kind(work, "copy")[rows] & ((size < 0) | (size > TINY_BYTES))
    waited = {wait.row: i for i, wait in enumerate(replay.waits) if not wait.from_start and wait.row >= 0}
    way, memory = (work[column].iloc[rows].astype("str").to_numpy() for column in ("copy", "memory"))
    exposed = iv.within(device.device_sets(rank).exposed_copy, *_times(work, rows))
    found = []
    for direction, kind in sorted(set(zip(way[counts], memory[counts], strict=True))):
        mine = counts & (way == direction) & (memory == kind)
        durations = replay.durations.copy()
        free = [waited[i] for i in np.flatnonzero(mine).tolist() if i in waited]
        if direction == "HtoD" and kind == "pageable":
            change, free = PINNED, sorted({*free, *_waits_behind(rank, asked, "pageable")})
            durations[mine] = _pinned_ns(rank, size[mine], replay.durations[mine])
        else:
            change = AHEAD if direction == "HtoD" else GONE
            durations[mine] = -1
            free = free if direction == "DtoH" else []
        # Copies that nobody waits for, and that hardly lie open, gain no more than that.
        gain = float(exposed[mine].sum()) / replay.steps
        if free or gain > LITTLE * asked.measured_ns:
            gain = asked.gain_ns(durations=durations, free=free)
        found.append({"copy": direction, "memory": kind, "change": change, "gain_ns": gain})
    return pd.DataFrame(found, columns=["copy", "memory", "change", "gain_ns"])


def _times(work: pd.DataFrame, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    start = work["start_ns"].to_numpy()[rows]
    return start, start + work["dur_ns"].to_numpy()[rows]


def _waits_behind(rank: RankData, asked: WhatIf, memory: str) -> list[int]:
    """Return the places of the replay's waits that lie in an operator which copies from such memory to the device."""
    around = copying_waits(rank, memory)
    return [i for i, wait in enumerate(asked.replay.waits) if iv.holds(around, np.array([wait.begin]))[0]]


def _pinned_ns(rank: RankData, size: NDArray[np.int64], now: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return what copies of these sizes take from pinned memory, ns; never longer than now."""
    work = device.device_work(rank)
    pinned = host.is_one_of(work["copy"], "HtoD") & host.is_one_of(work["memory"], "pinned")
    large = pinned & (work["bytes"].to_numpy() >= _RATE_BYTES) & (work["dur_ns"].to_numpy() > 0)
    if large.any():
        rate = float(np.median(work["bytes"].to_numpy()[large] / work["dur_ns"].to_numpy()[large])) * 1e9
    else:
        rate = (host_link(device_of(rank.facts, rank.trace_facts)[0]) or 0.0) * PCIE_REACHED
    if not rate:
        return now
    then: NDArray[np.int64] = np.where(size > 0, np.minimum(now, size / rate * 1e9), now).astype(np.int64)
    return then


def hideable(run: Measured, exposed: Mapping[int, float]) -> dict[int, float]:
    """Bound exposed copy time (rank → ns a step) by the computation behind which it could be hidden.

    That is the step's, less what hides other copies already: they share the link.
    """
    computation = part(run, "computation")
    frame = run.frame(copies)
    hidden = by_rank(frame.assign(hidden_ns=(frame["copy_ns"] - frame["exposed_ns"]).clip(lower=0.0)), "hidden_ns")
    return {r: min(ns, max(0.0, computation.get(r, 0.0) - hidden.get(r, 0.0))) for r, ns in exposed.items()}
