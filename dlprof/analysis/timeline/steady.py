"""Which recorded steps are steady, and how sure their mean is."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis.engine import RANK, Frame, Maybe, RankFacts, maybe, needs, within_rank

# Fewer steady steps than this say less than the traced ones do.
ENOUGH = 5

# The device's clock counts where it measured so many of the steps.
ON_DEVICE_SHARE = 0.9

# Allocator, autotuner and lazy initialisation are busy in the first steps: at least these are left out, and then all
# up to the first one that is no longer than 1.25 × the median. Never more than a third of the run.
WARMUP_STEPS = 3
SETTLED = 1.25

# A host has all of its lead over the device once it has gained this share of the most that it ever gains.
NEARLY_ALL = 0.98

# Where so many steps train, and more than this share of them begin an epoch (one batch an epoch, or a new iterator for
# each batch), that is no exception.
_MANY, _EACH = 20, 0.9

# Steps that follow each other are alike: a clock that sinks or a neighbour on the machine holds for many of them. The
# means of so many stretches of the run show it, as the single steps do not.
STRETCHES = 10

# A suspended job's processes go on one after the other, and the supervisor is only one of them: what lies this close
# to the time at which it saw the job go on may hold the time in which the job stood.
RESUMED_NS = 500_000_000

# A host waits for all that it has launched in steps this many times as long as the median and at least this share of
# the longest, if such steps are this share of the time.
_LONGER, _AS_LONG, _MOSTLY = 3.0, 0.5, 0.4

# Training stood still in a step that is so many times as long as the median and takes so long, where there are at most
# so many of these, and they take this share of all steps' time: an accident of the job, and not how its steps are.
_STANDS, _STOOD_NS, _ACCIDENTS, _NOTICED = 50.0, 1e9, 3, 0.05

# XProf's input pipeline analyzer and the TensorBoard plugin call a job input-bound that waits for this share.
STARVED = 0.05

# Student's t for a two-sided 95 % interval, by degrees of freedom, over its value for many: a mean of three steps is
# known far less well than its standard error says.
_STUDENT = (6.48, 2.20, 1.62, 1.42, 1.31, 1.25, 1.21, 1.18, 1.15, 1.14)


def device_type(rank: RankFacts) -> str | None:
    """Return what a rank trains on, as recorded: "cpu", "cuda", ...; None: not recorded."""
    found: str | None = (rank.facts.get("device") or {}).get("type")
    return found


@within_rank
def light_steps(
    steps: Frame = needs(schema.STEPS),
    loading: Maybe[Frame] = maybe(schema.LOADING),
    stalls: Maybe[Frame] = maybe(schema.STALLS),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return the step log with columns `steady` and `length_ns`; steps in which the job was stopped are "suspended".

    The few in which training stood still for no cause that was recorded are "stalled".

    `length_ns` is the step's length on the device's own clock where that measured nearly all steps: a host that runs
    ahead of its device leaves its steps early and waits later, so its own steps equal the device's only in the mean of
    very many. There, steps without that length are not steady. Without the device's clock, the steps in which the host
    regains its lead after a stop are not steady, and what they are too short by is taken from the steps that stopped.
    """
    start, dur = steps["start_ns"].to_numpy(), steps["dur_ns"].to_numpy()
    kind = steps["kind"].astype("str").to_numpy()
    if not (kind == "train").any():
        kind = np.where(kind == "validation", "train", kind)  # a job that only infers: these are its steps
    kind = np.where(suspended(rank, start, start + dur), "suspended", kind)
    first, trains = steps["first"].to_numpy() != 0, kind == "train"
    if trains.sum() >= _MANY and first[trains].mean() > _EACH:
        first = np.zeros(len(steps), bool)  # each step begins an epoch: that is what its steps are like
    candidate = trains & ~first & (steps["profiled"].to_numpy() == 0) & (dur > 0)
    length, on_device = dur.astype(float), steps["device_step_ns"].to_numpy()
    on_its_clock = candidate.any() and np.mean(on_device[candidate] > 0) >= ON_DEVICE_SHARE
    if on_its_clock:
        candidate, length = candidate & (on_device > 0), np.where(on_device > 0, on_device, length)
    steady = candidate & (np.arange(len(steps)) >= _settled(length, candidate))
    stood = _stands_still(steps["step"].to_numpy(), dur, steady, stalls.or_none())
    kind, steady = np.where(stood, "stalled", kind), steady & ~stood
    if not on_its_clock and steady.any() and device_type(rank) not in (None, "cpu"):
        steady, length = _without_lead(length, steady)
    if loading:
        steady = _without_stock(steps, loading.get(), length, steady)
    return steps.assign(kind=pd.Categorical(kind), steady=steady, length_ns=length)


@within_rank
def steady_steps(light_steps: Frame = needs(light_steps)) -> pd.DataFrame:
    """Return the steady rows of `light_steps`."""
    return light_steps[light_steps["steady"]]


def _without_stock(
    steps: pd.DataFrame, loading: pd.DataFrame, length: NDArray[np.float64], steady: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Return the steady steps without those that use up batches which were made ahead, of a loader too slow for them.

    Workers go on while the job starts or the profiler is being prepared. Until the steps after that find no more
    batches ready than the median of the later half, they are as short as if the loader were fast. What is ready when an
    epoch begins is part of every epoch, and counts.
    """
    fewest = loading[(loading["count"] == 1) & (loading["ready"] >= 0)].groupby("step")["ready"].min()
    ready = fewest.reindex(steps["step"]).to_numpy(dtype=float)
    known = np.flatnonzero(steady & ~np.isnan(ready))
    later = known[len(known) // 2 :]
    if not len(later) or steps["fetch_ns"].to_numpy()[later].clip(0).sum() < STARVED * length[later].sum():
        return steady
    more, left = ready > np.median(ready[later]), steady.copy()
    for first, stop in zip(*_stretches(steady), strict=True):
        if first == known[0] or not steps["first"].to_numpy()[first - 1]:
            settled = np.flatnonzero(~more[first:stop])
            left[first : first + settled[0] if len(settled) else stop] = False
    return left


def _stands_still(
    number: NDArray[np.int64], dur: NDArray[np.int64], steady: NDArray[np.bool_], stalls: pd.DataFrame | None
) -> NDArray[np.bool_]:
    """Return which steady steps training stood still in, besides collections, checkpoints and compilations."""
    left = dur.astype(float)
    if stalls is not None and len(stalls):
        left = left - pd.Series(number).map(stalls.groupby("step")["dur_ns"].sum()).fillna(0.0).to_numpy(dtype=float)
    usual = float(np.median(dur[steady])) if steady.any() else np.inf
    found: NDArray[np.bool_] = steady & (left >= max(_STOOD_NS, _STANDS * usual))
    rare = int(found.sum()) <= min(_ACCIDENTS, int(steady.sum()) // 20)
    if not rare or float(dur[found].sum()) < _NOTICED * float(dur[steady].sum()):
        found[:] = False
    return found


def suspended(rank: RankFacts, start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which of these stretches of time may hold one in which the job was stopped."""
    first = np.searchsorted(rank.resumed_ns, start - RESUMED_NS)
    found: NDArray[np.bool_] = first < np.searchsorted(rank.resumed_ns, end + RESUMED_NS, side="right")
    return found


def on_device_clock(steps: pd.DataFrame) -> bool:
    """Return whether the step log has the length of all these steps on the device's own clock."""
    return len(steps) > 0 and bool((steps["device_step_ns"] > 0).all())


def _settled(length: NDArray[np.float64], candidate: NDArray[np.bool_]) -> int:
    """Return the row at which the warm-up is over."""
    rows = np.flatnonzero(candidate)
    if not len(rows):
        return 0
    calm = np.flatnonzero(length[rows][WARMUP_STEPS:] <= SETTLED * float(np.median(length[rows])))
    over = WARMUP_STEPS + (int(calm[0]) if len(calm) else 0)
    return int(rows[min(over, max(1, len(rows) // 3), len(rows) - 1)])


def _without_lead(
    length: NDArray[np.float64], steady: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Return the steady steps without those in which the host regains its lead, and all lengths with these corrected.

    Such steps follow steps that are not steady, and are shorter than the median, since the host does not wait for its
    device yet. The device had gone on with what was queued while the host was stopped: the steps before them are
    shorter by as much. A few steps between two stops show only how the host's lead changed.
    """
    length, regaining = length.copy(), np.zeros(len(length), dtype=bool)
    usual = float(np.median(length[steady]))
    starts, stops = _stretches(steady)
    for before, first, stop in zip(np.append(0, stops[:-1]), starts, stops, strict=True):
        # Now and then the host waits while it regains its lead: nearly all of it counts.
        gained = np.cumsum(usual - length[first:stop])
        settled = int(np.argmax(gained >= NEARLY_ALL * gained.max())) + 1
        if gained[settled - 1] < settled * usual * (1 - 1 / SETTLED):
            continue
        last = first + settled
        lead, stopped = usual * settled - length[first:last].sum(), length[before:first].sum()
        regaining[first:last], length[first:last] = True, usual
        if stopped:
            length[before:first] *= max(1 - lead / stopped, 0.0)
    left = _between_waits(length, steady & ~regaining)
    starts, stops = _stretches(left)
    if len(starts) and (stops - starts).max() >= ENOUGH:
        for first, stop in zip(starts, stops, strict=True):
            left[first:stop] &= stop - first >= ENOUGH
    return left, length


def _between_waits(length: NDArray[np.float64], steady: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the steady steps without those before the first wait for the device, and after the last one.

    A host that runs ahead and waits for its device now and then (it reads the loss every tenth step) has nearly all of
    its time in those steps: only from one to another is their mean the device's.
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


def standard_error(values: NDArray[np.float64]) -> float:
    """Return the standard error of the mean, widened where there are few values; 0 where there is but one.

    Twice this is half of the 95 % confidence interval, for any number of values.
    """
    return float(standard_errors(values[np.newaxis])[0])


# Steps come in turn, as those of two networks that are trained against each other, where their place in so many steps
# says this share of how their lengths vary, seen in so many turns.
_MOST_IN_TURN, _SAID, _TURNS = 8, 0.8, 8


@within_rank
def in_turn(steady_steps: Frame = needs(steady_steps)) -> int:
    """Return in how many steps of different lengths the steady ones repeat; 1: they do not."""
    length, number = steady_steps["length_ns"].to_numpy(dtype=float), steady_steps["step"].to_numpy()
    whole = float(((length - length.mean()) ** 2).sum()) if len(length) else 0.0
    for several in range(2, _MOST_IN_TURN + 1):
        if whole and len(length) >= _TURNS * several and len(np.unique(number % several)) == several:
            of_place = pd.Series(length).groupby(number % several).transform("mean").to_numpy()
            if float(((length - of_place) ** 2).sum()) <= (1 - _SAID) * whole:
                return several
    return 1


def error_in_turn(values: NDArray[np.float64], several: int) -> float:
    """Return the standard error of the mean of consecutive steps of which so many come in turn, by what is left of them
    without the mean of their place; as `standard_error` where there are too few.
    """
    if several < 2 or len(values) <= several:
        return standard_error(values)
    place = np.arange(len(values)) % several
    left = values - pd.Series(values).groupby(place).transform("mean").to_numpy()
    freedom = len(values) - several
    return widened(freedom) * math.sqrt(float((left**2).sum()) / freedom / len(values))


def stretch_means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the means of STRETCHES consecutive stretches of the values."""
    return np.array([stretch.mean() for stretch in np.array_split(values, STRETCHES)])


def standard_errors(values: np.ndarray) -> NDArray[np.float64]:
    """Return the standard error of each row's mean, as `standard_error` does."""
    rows, n = values.shape
    if n < 2:
        return np.zeros(rows)
    errors: NDArray[np.float64] = widened(n - 1) * values.std(axis=1, ddof=1) / np.sqrt(n)
    return errors


def widened(freedom: int) -> float:
    """Return what a standard error is multiplied by, for twice of it to be half of the 95 % confidence interval."""
    return _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1 + 1.25 / freedom
