"""Copies between host and device: how many, how large, from which memory, and how much of them nothing hides."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import intervals as iv
from dlprof.analysis import settings
from dlprof.analysis.compute.peaks import PCIE_REACHED, device_of, host_link
from dlprof.analysis.engine import RANK, Frame, RankFacts, by_rank, needs, per_rank, within_rank
from dlprof.analysis.host.waiting import copying_waits
from dlprof.analysis.step.breakdown import part
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import DeviceSets, device_sets, device_work
from dlprof.analysis.timeline.host import on_training_thread
from dlprof.analysis.timeline.steps import Timing, launched_within, timing
from dlprof.analysis.timeline.what_if import LITTLE, WhatIf, what_if

TINY_BYTES = 4_096  # scalars (a loss, a counter) are smaller; what they cost is a wait, not a copy
_RATE_BYTES = 1 << 20  # smaller copies take as long to start as to run, and do not show the rate of their link
# Pinning copies as a copy from pageable memory does, but not into a buffer that stays in the cache: 1.25 × as long for
# 200 MB on a host of an H200, 1.2 to 1.3 × on an AMD EPYC. Shared memory from workers is then freed, ns a byte: 0.097
# and 0.2 there. With these, pinning was known to a tenth.
_INTO_PINNED = 1.25
_FREEING = (0.097, 0.2)
_KNOWN_TO = 1.1

NOTABLE_SHARE = 0.03  # from where the analysis tools of NVIDIA and AMD advise a change of exposed pageable copies


@per_rank
def copies(
    device_sets: DeviceSets = needs(device_sets),
    timing: Timing = needs(timing),
    device_work: Frame = needs(device_work),
    launched_within: NDArray[np.int64] = needs(launched_within),
) -> pd.DataFrame:
    """Return the copies of the steady traced steps, one row a direction and host memory, per mean step.

    Columns: copy, memory, count, bytes (−1: the trace does not say), copy_ns, exposed_ns; the tiny ones left out.
    Exposed time is exclusive: two copies at once count once, for the row that comes first. Raises NotMeasured where
    the trace holds no work of a device.
    """
    n = len(timing.windows)
    chosen = device_work[(launched_within >= 0) & _counts(device_work)]
    exposed = iv.intersect(device_sets.exposed_copy, iv.merge(timing.windows))
    rows = []
    for (direction, memory), group in chosen.groupby(["copy", "memory"], observed=True):
        mine = iv.intersect(exposed, host.cover(group))
        exposed = iv.subtract(exposed, mine)
        known = bool((group["bytes"] >= 0).all())
        means = (len(group) / n, float(group["bytes"].sum()) / n if known else -1.0, float(group["dur_ns"].sum()) / n)
        rows.append((str(direction), str(memory), *means, iv.total(mine) / n))
    return pd.DataFrame(rows, columns=["copy", "memory", "count", "bytes", "copy_ns", "exposed_ns"])


@within_rank
def freeing_ns(copies: Frame = needs(copies), rank: RankFacts = needs(RANK)) -> tuple[float, float]:
    """Return between which times the training thread frees workers' batches, ns a step; it calls nothing meanwhile."""
    moved = float(copies.loc[from_pageable(copies), "bytes"].clip(lower=0).sum())
    least, most = _FREEING if settings.loader_of(rank.facts).get("num_workers") else (0.0, 0.0)
    return least * moved, most * moved


@per_rank
def copy_gains(
    what_if: WhatIf = needs(what_if),
    device_work: Frame = needs(device_work),
    device_sets: DeviceSets = needs(device_sets),
    on_training_thread: Frame = needs(on_training_thread),
    freeing_ns: tuple[float, float] = needs(freeing_ns),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return how much shorter the mean steady step would be with changed copies: copy, memory, gain_ns, pinning_ns.

    Copies from pageable memory to the device become as fast as the link is for pinned memory (as fast as now where
    neither the trace nor the GPU's name shows that), and are not waited for; the step takes no less than pinning_ns,
    for which the thread that pins its batches is then busy (0: not known). All others are gone from the stream that
    computes. The tiny ones are left out. Raises NotMeasured where the trace cannot be replayed.
    """
    replay = what_if.replay
    work = device_work[["kind", "copy", "memory", "bytes", "start_ns", "dur_ns"]].iloc[replay.rows]
    work = work.reset_index(drop=True)
    start = work["start_ns"].to_numpy()
    exposed = iv.within(device_sets.exposed_copy, start, start + work["dur_ns"].to_numpy())
    waited = {wait.row: i for i, wait in enumerate(replay.waits) if not wait.from_start and wait.row >= 0}
    found = []
    for (direction, memory), copied in work[_counts(work)].groupby(["copy", "memory"], observed=True):
        mine = copied.index.to_numpy()
        durations, pinning_ns = replay.durations.copy(), 0.0
        free = {waited[i] for i in mine.tolist() if i in waited}
        if (direction, memory) == ("HtoD", "pageable"):
            around = copying_waits(on_training_thread, device_work, "pageable")
            begins = np.array([wait.begin for wait in replay.waits], dtype=np.int64)
            free |= set(np.flatnonzero(iv.holds(around, begins)).tolist())
            pinning_ns = _pinning_ns(what_if, float(durations[mine].sum()) / replay.steps, freeing_ns[1], rank)
            durations[mine] = _pinned_ns(device_work, rank, copied["bytes"].to_numpy(), durations[mine])
        else:
            durations[mine] = -1
            free = free if direction == "DtoH" else set()
        # Without copies that the host does not wait for, and that are hardly exposed, no more than that is gained.
        gain = float(exposed[mine].sum()) / replay.steps
        if free or gain > LITTLE * what_if.measured_ns:
            gain = what_if.gain_ns(durations=durations, free=sorted(free))
        gain = min(gain, max(what_if.measured_ns - _KNOWN_TO * pinning_ns, 0.0))
        found.append((str(direction), str(memory), gain, pinning_ns))
    return pd.DataFrame(found, columns=["copy", "memory", "gain_ns", "pinning_ns"])


def _counts(work: pd.DataFrame) -> NDArray[np.bool_]:
    """Return which work is a copy of more than a few bytes."""
    size = work["bytes"].to_numpy()
    return host.is_kind(work, "copy") & ((size < 0) | (size > TINY_BYTES))


def _pinned_ns(
    device_work: pd.DataFrame, rank: RankFacts, size: NDArray[np.int64], now: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return what copies of these sizes take from pinned memory, ns; never longer than now."""
    pinned = host.is_one_of(device_work["copy"], "HtoD") & host.is_one_of(device_work["memory"], "pinned")
    large = device_work[pinned & (device_work["bytes"] >= _RATE_BYTES) & (device_work["dur_ns"] > 0)]
    if len(large):
        rate = float((large["bytes"] / large["dur_ns"]).median()) * 1e9
    else:
        rate = (host_link(device_of(rank.facts, rank.trace_facts)[0]) or 0.0) * PCIE_REACHED
    if not rate:
        return now
    then: NDArray[np.int64] = np.where(size > 0, np.minimum(now, size / rate * 1e9), now).astype(np.int64)
    return then


def _pinning_ns(what_if: WhatIf, copying_ns: float, freeing_ns: float, rank: RankFacts) -> float:
    """Return for how long of a step the thread that would pin its batches is busy, ns; 0: none would, or unknown."""
    loader, did = settings.loader_of(rank.facts), what_if.host
    if loader.get("pin_memory") is not False:
        return 0.0
    python, calls = what_if.host_ns(did.python), what_if.host_ns(iv.merge(did.calls, did.fetch))
    beside = min(python, freeing_ns) if loader.get("num_workers") else python + calls
    return _INTO_PINNED * copying_ns + beside


def from_pageable(copies: pd.DataFrame) -> pd.Series[bool]:
    """Return which rows of `copies` or `copy_gains` are copies from pageable memory to the device."""
    return (copies["copy"] == "HtoD") & (copies["memory"] == "pageable")


def hideable(breakdown: pd.DataFrame, copies: pd.DataFrame, exposed: Mapping[int, float]) -> dict[int, float]:
    """Bound exposed copy time (rank → ns a step) by the computation behind which it could be hidden.

    That is the step's computation, less the part that already hides other copies: they share the link.
    """
    computation = part(breakdown, "computation")
    hidden = by_rank(copies.assign(hidden_ns=(copies["copy_ns"] - copies["exposed_ns"]).clip(lower=0.0)), "hidden_ns")
    return {r: min(ns, max(0.0, computation.get(r, 0.0) - hidden.get(r, 0.0))) for r, ns in exposed.items()}
