"""Which recorded steps are steady, and how sure their mean is."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis.engine import RankFacts, within_rank

# Fewer steady steps than this say less than the traced ones do.
ENOUGH = 5

# The device's clock counts where it measured so many of the steps.
ON_DEVICE_SHARE = 0.9

# Allocator, autotuner and lazy initialisation are busy in the first steps: at least these are left out, and then all
# up to the first one that is no longer than 1.25 × the median. Never more than a third of the run.
WARMUP_STEPS = 3

SETTLED = 1.25

# So much of a host's lead is all of it.
NEARLY_ALL = 0.98

# A suspended job's processes go on one after the other, and the supervisor is only one of them: what lies this close
# to the time at which it saw the job go on may hold the time in which the job stood.
RESUMED_NS = 500_000_000


@within_rank
def light_steps(steps: pd.DataFrame, rank: RankFacts) -> pd.DataFrame:
    """Return the light layer's steps with columns `steady` and `length_ns`; suspended ones are of that kind.

    `length_ns` is how long a step is on the device's own clock where that measured nearly all of them: a host that runs
    ahead of its device leaves its steps early, and later waits, so its own steps tell the device's only in the mean of
    very many. There, steps without that length are not steady. Without the device's clock, the steps are not steady in
    which the host only gets its lead again after a stop; how much they are too short is taken from what stopped it.
    """
    frame = steps
    start, dur = frame["start_ns"].to_numpy(), frame["dur_ns"].to_numpy()
    kind = np.where(suspended(rank, start, start + dur), "suspended", frame["kind"].astype("str"))
    frame = frame.assign(kind=pd.Categorical(kind))
    trains = kind == "train"
    candidate = trains & (frame["first"].to_numpy() == 0) & (frame["profiled"].to_numpy() == 0) & (dur > 0)
    length = dur.astype(float)
    on_device = frame["device_step_ns"].to_numpy()
    if candidate.any() and np.mean(on_device[candidate] > 0) >= ON_DEVICE_SHARE:
        candidate, length = candidate & (on_device > 0), np.where(on_device > 0, on_device, length)
        steady = candidate & (np.arange(len(frame)) >= _settled(length, candidate))
    else:
        steady = candidate & (np.arange(len(frame)) >= _settled(length, candidate))
        if (rank.facts.get("device") or {}).get("type") not in (None, "cpu"):
            steady = _without_lead(length, steady)
    return frame.assign(steady=steady, length_ns=length)


# In steps that are so many times as long as most, and about as long as the longest, a host waits for all that it has
# launched, if such steps are so much of the time.
_LONGER = 3.0

_AS_LONG = 0.5

_MOSTLY = 0.4


def _without_lead(length: NDArray[np.float64], steady: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the steady steps without those in which the host gets its lead again; changes their lengths.

    Those follow steps that are not steady and are shorter than usual, since the host does not wait for its device yet.
    The device had gone on with what was queued while the host was stopped: the lengths of the steps before are less by
    as much. A few steps between two stops tell only how the host's lead changed.
    """
    found = np.zeros(len(length), dtype=bool)
    if not steady.any():
        return steady
    usual = float(np.median(length[steady]))
    starts, stops = _stretches(steady)
    for before, first, stop in zip(np.append(0, stops[:-1]), starts, stops, strict=True):
        # The host has its lead where it has gained nearly all that it ever gains; now and then it waits meanwhile.
        gained = np.cumsum(usual - length[first:stop])
        settled = int(np.argmax(gained >= NEARLY_ALL * gained.max())) + 1
        if gained[settled - 1] < settled * usual * (1 - 1 / SETTLED):
            continue
        last = first + settled
        found[first:last] = True
        ahead, stopped = usual * (last - first) - length[first:last].sum(), length[before:first].sum()
        length[first:last] = usual
        if stopped:
            length[before:first] *= max(1 - ahead / stopped, 0.0)
    left = _between_waits(length, steady & ~found)
    starts, stops = _stretches(left)
    if len(starts) and (stops - starts).max() >= ENOUGH:
        for first, stop in zip(starts, stops, strict=True):
            left[first:stop] &= stop - first >= ENOUGH
    return left


def _between_waits(length: NDArray[np.float64], steady: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the steady steps without those before the first wait for the device, and after the last one.

    A host that runs ahead and waits for its device now and then (reading the loss every tenth step, say) has nearly all
    of its time in those steps: only from one to another is their mean the device's.
    """
    if not steady.any():
        return steady
    waits = steady & (length > np.maximum(_LONGER * np.median(length[steady]), _AS_LONG * length[steady].max()))
    whole = np.zeros(len(length), dtype=bool)
    if length[waits].sum() >= _MOSTLY * length[steady].sum():
        for first, stop in zip(*_stretches(steady), strict=True):
            at = first + np.flatnonzero(waits[first:stop])
            if len(at) > 1:
                whole[at[0] + 1 : at[-1] + 1] = True
    return whole if whole.any() else steady


def _stretches(chosen: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where stretches of chosen rows begin, and where they have ended."""
    edges = np.flatnonzero(np.diff(chosen.astype(np.int8), prepend=0, append=0))
    return edges[::2], edges[1::2]


def suspended(rank: RankFacts, start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which of these stretches of time hold one in which the job was stopped, before it went on again."""
    first = np.searchsorted(rank.resumed_ns, start - RESUMED_NS)
    found: NDArray[np.bool_] = first < np.searchsorted(rank.resumed_ns, end + RESUMED_NS, side="right")
    return found


def _settled(dur: NDArray[np.float64], candidate: NDArray[np.bool_]) -> int:
    """Return the row at which the warm-up is over."""
    rows = np.flatnonzero(candidate)
    if not len(rows):
        return 0
    most = max(1, len(rows) // 3)
    limit = SETTLED * float(np.median(dur[rows]))
    calm = np.flatnonzero(dur[rows][WARMUP_STEPS:] <= limit)
    over = WARMUP_STEPS + int(calm[0]) if len(calm) else WARMUP_STEPS
    return int(rows[min(over, most, len(rows) - 1)])


# Student's t for a two-sided 95 % interval, by degrees of freedom, over its value for many: a mean of three steps is
# known far less well than its standard error says.
_STUDENT = (6.48, 2.20, 1.62, 1.42, 1.31, 1.25, 1.21, 1.18, 1.15, 1.14)


def standard_error(values: NDArray[np.float64]) -> float:
    """Return the standard error of the mean, widened where there are few values; 0 where there is but one.

    Twice this is half of the 95 % confidence interval, for any number of values.
    """
    return float(standard_errors(values[np.newaxis])[0])


def standard_errors(values: np.ndarray) -> NDArray[np.float64]:
    """Return the standard error of each row's mean, as `standard_error` does."""
    rows, n = values.shape
    if n < 2:
        return np.zeros(rows)
    widened = _STUDENT[n - 2] if n - 2 < len(_STUDENT) else 1 + 1.25 / (n - 1)
    errors: NDArray[np.float64] = widened * values.std(axis=1, ddof=1) / np.sqrt(n)
    return errors
