"""Copies between host and device: how many, how large, from which memory, and how much of them nothing hides."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import intervals as iv
from dlprof.analysis.compute.peaks import PCIE_REACHED, device_of, host_link
from dlprof.analysis.engine import RankFacts, by_rank, per_rank
from dlprof.analysis.host.syncs import copying_waits
from dlprof.analysis.step.breakdown import part
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import DeviceSets
from dlprof.analysis.timeline.steps import Timing
from dlprof.analysis.timeline.what_if import LITTLE, WhatIf

# Scalars (a loss, a counter) are copied in a few bytes; what they cost is a wait, not a copy.
TINY_BYTES = 4_096


@per_rank
def copies(
    device_sets: DeviceSets, timing: Timing, device_work: pd.DataFrame, launched_within: NDArray[np.int64]
) -> pd.DataFrame:
    """Return the copies of the steady traced steps, one row a direction and host memory, per mean step.

    Columns: copy, memory, count, bytes (−1: the trace does not say), copy_ns, exposed_ns; the tiny ones left out.
    Exposed time is exclusive: two copies at once count once, for the row that comes first. Raises NotMeasured where
    the trace holds no work of a device.
    """
    n = len(timing.windows)
    within = iv.merge(timing.windows)
    inside = launched_within >= 0
    size = device_work["bytes"].to_numpy()
    counts = inside & host.is_kind(device_work, "copy") & ((size < 0) | (size > TINY_BYTES))
    chosen = device_work[counts]
    exposed = iv.intersect(device_sets.exposed_copy, within)
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
def copy_gains(
    what_if: WhatIf,
    device_work: pd.DataFrame,
    device_sets: DeviceSets,
    on_training_thread: pd.DataFrame,
    rank: RankFacts,
) -> pd.DataFrame:
    """Return how much shorter the mean steady step would be with changed copies, ns: copy, memory, change, gain_ns.

    Of copies from pageable memory to the device `pinned`: as fast as the link is for pinned memory (where neither the
    trace nor the GPU's name tells that, as fast as now), and not waited for. Of all others `ahead`: they run beside
    computation on a stream of their own; or, within the device and on the way back, `gone`. The tiny ones left out.
    Raises NotMeasured where the trace cannot be replayed.
    """
    replay = what_if.replay
    rows = replay.rows
    size = device_work["bytes"].to_numpy()[rows]
    counts = host.is_kind(device_work, "copy")[rows] & ((size < 0) | (size > TINY_BYTES))
    waited = {wait.row: i for i, wait in enumerate(replay.waits) if not wait.from_start and wait.row >= 0}
    way, memory = (device_work[column].iloc[rows].astype("str").to_numpy() for column in ("copy", "memory"))
    exposed = iv.within(device_sets.exposed_copy, *_times(device_work, rows))
    found = []
    for direction, kind in sorted(set(zip(way[counts], memory[counts], strict=True))):
        mine = counts & (way == direction) & (memory == kind)
        durations = replay.durations.copy()
        free = [waited[i] for i in np.flatnonzero(mine).tolist() if i in waited]
        if direction == "HtoD" and kind == "pageable":
            change, free = PINNED, sorted({*free, *_waits_behind(on_training_thread, device_work, what_if, "pageable")})
            durations[mine] = _pinned_ns(device_work, rank, size[mine], replay.durations[mine])
        else:
            change = AHEAD if direction == "HtoD" else GONE
            durations[mine] = -1
            free = free if direction == "DtoH" else []
        # Copies that nobody waits for, and that hardly lie open, gain no more than that.
        gain = float(exposed[mine].sum()) / replay.steps
        if free or gain > LITTLE * what_if.measured_ns:
            gain = what_if.gain_ns(durations=durations, free=free)
        found.append({"copy": direction, "memory": kind, "change": change, "gain_ns": gain})
    return pd.DataFrame(found, columns=["copy", "memory", "change", "gain_ns"])


def _times(work: pd.DataFrame, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    start = work["start_ns"].to_numpy()[rows]
    return start, start + work["dur_ns"].to_numpy()[rows]


def _waits_behind(on_training_thread: pd.DataFrame, device_work: pd.DataFrame, asked: WhatIf, memory: str) -> list[int]:
    """Return the places of the replay's waits that lie in an operator which copies from such memory to the device."""
    around = copying_waits(on_training_thread, device_work, memory)
    return [i for i, wait in enumerate(asked.replay.waits) if iv.holds(around, np.array([wait.begin]))[0]]


def _pinned_ns(
    device_work: pd.DataFrame, rank: RankFacts, size: NDArray[np.int64], now: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return what copies of these sizes take from pinned memory, ns; never longer than now."""
    pinned = host.is_one_of(device_work["copy"], "HtoD") & host.is_one_of(device_work["memory"], "pinned")
    large = pinned & (device_work["bytes"].to_numpy() >= _RATE_BYTES) & (device_work["dur_ns"].to_numpy() > 0)
    if large.any():
        rate = float(np.median(device_work["bytes"].to_numpy()[large] / device_work["dur_ns"].to_numpy()[large])) * 1e9
    else:
        rate = (host_link(device_of(rank.facts, rank.trace_facts)[0]) or 0.0) * PCIE_REACHED
    if not rate:
        return now
    then: NDArray[np.int64] = np.where(size > 0, np.minimum(now, size / rate * 1e9), now).astype(np.int64)
    return then


def hideable(breakdown: pd.DataFrame, copies: pd.DataFrame, exposed: Mapping[int, float]) -> dict[int, float]:
    """Bound exposed copy time (rank → ns a step) by the computation behind which it could be hidden.

    That is the step's, less what hides other copies already: they share the link.
    """
    computation = part(breakdown, "computation")
    hidden = by_rank(copies.assign(hidden_ns=(copies["copy_ns"] - copies["exposed_ns"]).clip(lower=0.0)), "hidden_ns")
    return {r: min(ns, max(0.0, computation.get(r, 0.0) - hidden.get(r, 0.0))) for r, ns in exposed.items()}
