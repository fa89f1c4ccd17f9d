"""Embedding tables in host memory, in a job that computes on a device, and their cost."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import intervals as iv
from dlprof.analysis.chains.calls import Calls, calls
from dlprof.analysis.engine import Frame, Maybe, maybe, needs, per_rank
from dlprof.analysis.step.partition import in_optimizer
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import LEAST_KERNEL_NS, Launches, device_work, launches
from dlprof.analysis.timeline.steps import Timing, timing
from dlprof.analysis.timeline.what_if import WhatIf, what_if

# An operator of the optimizer that launches nothing and takes this long updates weights on the host.
_CHANGES_NS = 20_000

# The looked-up rows are copied by one of the next calls, after others on the host (`stack`, `sum`).
_NEXT = 16

# A device reads and writes the rows at its memory's rate, a hundred times that of pageable copies (2 TB/s, 7 GB/s on an
# A100): this share of the copy is left.
_LEFT = 0.02

COLUMNS = ("lookups", "lookup_ns", "gradient_ns", "optimizer_ns", "copies", "copy_ns", "copy_bytes", "gain_ns")


@per_rank
def host_tables(
    calls: Calls = needs(calls),
    timing: Timing = needs(timing),
    what_if: WhatIf = needs(what_if),
    launches: Launches = needs(launches),
    device_work: Frame = needs(device_work),
    in_optimizer: Maybe[iv.Intervals] = maybe(in_optimizer),
) -> pd.DataFrame:
    """Return one row: the cost of embeddings in host memory in a mean steady traced step; no row: there are none.

    Columns: lookups, lookup_ns, gradient_ns and optimizer_ns (of the host, in operators that launch nothing), copies,
    copy_ns and copy_bytes (of what was looked up, to the device, and of its gradients back), gain_ns (how much shorter
    the mean steady step would be with all of that on the device). Raises NotMeasured where no trace can be replayed.
    """
    launching = np.zeros(len(calls.text), dtype=bool)
    launching[calls.kernel_of[calls.kernel_of >= 0]] = True
    steady = iv.holds(timing.host_windows, calls.begin) & ~launching
    lookups = np.flatnonzero(steady & calls.has("4"))
    copied = np.flatnonzero(host.is_kind(device_work, "copy") & launches.known)
    called = launches.called[copied]
    there, moved = _behind(calls, lookups, launching, called)
    if not len(moved):
        return pd.DataFrame({c: pd.Series(dtype=float) for c in COLUMNS})
    gradients = np.flatnonzero(steady & calls.has("5"))
    back, moved_back = _before(calls, gradients, np.flatnonzero(calls.has("T")), called)
    inside = in_optimizer.or_none()
    changing = steady & (calls.end - calls.begin >= _CHANGES_NS)
    changing &= iv.holds(iv.EMPTY if inside is None else inside, calls.begin)
    parts = {"lookup_ns": lookups, "gradient_ns": gradients, "optimizer_ns": np.flatnonzero(changing)}
    times = {name: iv.union(calls.begin[places], calls.end[places]) for name, places in parts.items()}
    gone = copied[np.unique(np.concatenate((moved, moved_back)))]
    copying = np.unique(np.concatenate((there, back)))
    n = max(len(timing.windows), 1)
    row = {
        "lookups": len(lookups) / n,
        **{name: iv.total(time) / n for name, time in times.items()},
        "copies": len(gone) / n,
        "copy_ns": float(device_work["dur_ns"].to_numpy()[gone].sum()) / n,
        "copy_bytes": float(device_work["bytes"].to_numpy()[gone].clip(min=0).sum()) / n,
        "gain_ns": _gain(what_if, gone, iv.merge(*times.values()), iv.union(calls.begin[copying], calls.end[copying])),
    }
    return pd.DataFrame([row], columns=list(COLUMNS))


def _gain(what_if: WhatIf, gone: NDArray[np.int64], working: iv.Intervals, copying: iv.Intervals) -> float:
    """Return what the mean step gains without work of the host, and with copies (rows of the device's work) gone."""
    replay = what_if.replay
    mine = np.isin(replay.rows, gone)
    left = np.maximum((replay.durations * _LEFT).astype(np.int64), LEAST_KERNEL_NS)
    durations = np.where(mine, np.minimum(left, replay.durations), replay.durations)
    begins = np.array([wait.begin for wait in replay.waits], dtype=np.int64)
    waits = iv.union(begins, np.array([wait.end for wait in replay.waits], dtype=np.int64))
    free = np.flatnonzero(iv.holds(copying, begins)).tolist()
    return what_if.gain_ns(durations=durations, other=((iv.subtract(working, waits), 0.0),), free=free)


def _behind(
    calls: Calls, lookups: NDArray[np.int64], launching: NDArray[np.bool_], called: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the casts or copies behind lookups, before the host launches anything else, and the copies they call."""
    places, found = [], []
    for lookup in lookups.tolist():
        for place in range(lookup + 1, min(lookup + 1 + _NEXT, len(launching))):
            if launching[place] or calls.lane[place] != calls.lane[lookup]:
                break
            if calls.text[place] in "to":
                mine = np.flatnonzero((called >= calls.begin[place]) & (called < calls.end[place]))
                if len(mine):
                    places.append(place)
                    found += mine.tolist()
                    break
    return np.array(places, dtype=np.int64), np.array(found, dtype=np.int64)


def _before(
    calls: Calls, gradients: NDArray[np.int64], casts: NDArray[np.int64], called: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return of gradients on the host the cast that ended last before each, on any thread, and the copies it calls."""
    casts = casts[np.argsort(calls.end[casts], kind="stable")]
    at = np.searchsorted(calls.end[casts], calls.begin[gradients], side="right") - 1
    places = np.unique(casts[at[at >= 0]])
    found = [np.flatnonzero((called >= calls.begin[p]) & (called < calls.end[p])) for p in places.tolist()]
    return places, np.concatenate([np.empty(0, dtype=np.int64), *found])
