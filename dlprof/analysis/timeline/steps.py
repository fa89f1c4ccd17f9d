"""The steps of a rank: which are steady, how long the mean one takes, and which of them the trace saw.

Steadiness is decided here and nowhere else. A steady step trains (it has a backward pass or an optimizer step), holds
neither the first batch of an epoch nor an epoch's end, was not slowed by the profiler, was not the one in which the job
was suspended, and comes after the warm-up. The mean, not the median, stands for them: a stall every k steps is part of
what training costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Maybe, RankFacts, across_ranks, per_rank, within_rank
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import DeviceSets
from dlprof.analysis.timeline.traced import TracedSteps
from dlprof.errors import NotMeasured

# Allocator, autotuner and lazy initialisation are busy in the first steps: at least these are left out, and then all
# up to the first one that is no longer than 1.25 × the median. Never more than a third of the run.
WARMUP_STEPS = 3
SETTLED = 1.25

# So much of a host's lead is all of it.
NEARLY_ALL = 0.98

# Fewer steady steps than this say less than the traced ones do.
ENOUGH = 5

# Traced kernels may take a little longer than others.
LEAST_OF_BUSY = 0.97

# The device's clock counts where it measured so many of the steps.
ON_DEVICE_SHARE = 0.9

# A suspended job's processes go on one after the other, and the supervisor is only one of them: what lies this close
# to the time at which it saw the job go on may hold the time in which the job stood.
RESUMED_NS = 500_000_000

# What travels of the series: enough for any screen and for a replay, a few kilobytes.
MOST_ROWS = 2_000

PHASES = ("fetch", "forward", "backward", "optimizer")


@dataclass(frozen=True)
class Timing:
    """How long the mean steady step of one rank is, and where in the trace its steps are.

    `windows` are the steady traced steps, (n, 2) in ns: on the device's clock where the trace holds a device
    (`timeline.traced`), else on the host's; `host_windows` the same steps on the host's. `numbers` are their step
    numbers, `chosen` their places among all traced steps. `phases` are the light layer's mean parts of a steady step on
    the host, empty where it was not recorded.
    """

    steps: int
    source: str
    unit: str
    step_ns: float
    noise_ns: float  # standard error of step_ns
    overhead: float | None
    windows: iv.Intervals
    host_windows: iv.Intervals
    numbers: NDArray[np.int64]
    chosen: NDArray[np.int64]
    phases: Mapping[str, float]


@within_rank
def timing(
    trace_window: TracedSteps,
    traced_steps: Maybe[pd.DataFrame],
    steps: Maybe[pd.DataFrame],
    has_device: bool,
    device_sets: Maybe[DeviceSets],
    light_steps: Maybe[pd.DataFrame],
    rank: RankFacts,
) -> Timing:
    """Return the timing of a rank; raise NotMeasured where neither the light layer nor a trace was recorded."""
    chosen = _chosen(traced_steps, steps, rank, trace_window)
    windows = trace_window.windows[chosen]
    where = {
        "windows": windows,
        "host_windows": trace_window.host[chosen],
        "numbers": trace_window.numbers[chosen] if len(trace_window.numbers) else trace_window.numbers,
        "chosen": chosen,
    }
    traced = (windows[:, 1] - windows[:, 0]).astype(float)
    busy_ns = _busy_ns(has_device, device_sets, windows)
    frame = light_steps.get() if steps else None
    steady = frame.loc[frame["steady"]] if frame is not None else None
    durations = steady["length_ns"].to_numpy() if steady is not None else np.empty(0)
    # No step is shorter than what the device does in it: such a mean is of a host that has not waited for its device
    # yet.
    fits = not len(traced) or (len(durations) >= ENOUGH and durations.mean() >= LEAST_OF_BUSY * busy_ns)
    if steady is not None and len(durations) and fits:
        means = {p: float(np.maximum(steady[f"{p}_ns"].to_numpy(), 0).mean()) for p in PHASES}
        slower = float(traced.mean() / durations.mean()) if len(traced) and trace_window.unit == "step" else None
        return Timing(
            steps=len(durations),
            source="steps",
            unit="step",
            step_ns=float(durations.mean()),
            noise_ns=standard_error(durations),
            overhead=slower,
            phases=means,
            **where,
        )
    if len(traced):
        return Timing(
            steps=len(traced),
            source="trace",
            unit=trace_window.unit,
            step_ns=float(traced.mean()),
            noise_ns=standard_error(traced),
            overhead=None,
            phases={},
            **where,
        )
    raise NotMeasured("no complete training step was recorded")


def _busy_ns(has_device: bool, device_sets: Maybe[DeviceSets], windows: iv.Intervals) -> float:
    """Return what a device computes and copies in the mean of some traced steps, ns; 0 without a device."""
    if not len(windows) or not has_device:
        return 0.0
    sets = device_sets.get()
    return iv.total(iv.intersect(iv.merge(sets.computation, sets.copy), iv.merge(windows))) / len(windows)


def on_device_clock(steps: pd.DataFrame) -> bool:
    """Return whether the light layer has the length of all these steps on the device's own clock."""
    return len(steps) > 0 and bool((steps["device_step_ns"] > 0).all())


@within_rank
def launched_within(trace_window: TracedSteps, timing: Timing) -> NDArray[np.int64]:
    """Return for each row of `device.device_work` the place of its step among `timing(rank).windows`; −1: none of them.

    Counts of a step (kernels, collectives, bytes) go by this: the step that launched the work.
    """
    chosen = timing.chosen
    place = np.full(len(trace_window.windows) + 1, -1, dtype=np.int64)
    place[chosen] = np.arange(len(chosen))
    step = trace_window.launched_in
    inside: NDArray[np.int64] = np.where(
        (step >= 0) & (step < len(trace_window.windows)), place[np.maximum(step, 0)], -1
    )
    return inside


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


def _chosen(
    traced_steps: Maybe[pd.DataFrame], steps: Maybe[pd.DataFrame], rank: RankFacts, found: TracedSteps
) -> NDArray[np.int64]:
    """Return the places of the traced steps that are steady and settled, launch work, and hold no stop of the job."""
    if found.unit == "trace":
        return np.arange(len(found.windows))
    start, end = found.host[:, 0], found.host[:, 1]
    keep = ~_longest(suspended(rank, start, end), end - start)
    if traced_steps:
        keep &= ~_unsteady(steps, found.numbers)
    for wanted in (found.launches, found.settled):
        if (keep & wanted).any():
            keep &= wanted
    return np.flatnonzero(keep if keep.any() else np.ones(len(keep), dtype=bool))


def _longest(found: NDArray[np.bool_], dur: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return the steps that were found; where all of them were, as of a window of short steps, only the longest."""
    return found if not found.all() or len(dur) < 2 else dur == dur.max()


def _unsteady(steps: Maybe[pd.DataFrame], numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which traced steps the light layer knows to be an epoch's first or last, or no training at all."""
    if not steps:
        return np.zeros(len(numbers), dtype=bool)
    frame = steps.get()
    odd = frame.loc[(frame["first"] != 0) | (frame["kind"] != "train"), "step"].to_numpy()
    found = np.isin(numbers, odd)
    return found if not found.all() else np.zeros(len(numbers), dtype=bool)


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


@per_rank
def step_means(timing: Timing, steps: Maybe[pd.DataFrame], light_steps: Maybe[pd.DataFrame]) -> pd.DataFrame:
    """Return one row: how many steady steps, their mean and its standard error in ns, source, unit, overhead, phases.

    lead_ns is from the start of a step to its first forward, fetching not counted. NaN: not known.
    """
    return pd.DataFrame(
        {
            "steps": [timing.steps],
            "source": [timing.source],
            "unit": [timing.unit],
            "step_ns": [timing.step_ns],
            "noise_ns": [timing.noise_ns],
            "overhead": [np.nan if timing.overhead is None else timing.overhead],
            "traced_steps": [len(timing.numbers)],
            "lead_ns": [_lead(steps, light_steps)],
            **{f"{p}_ns": [timing.phases.get(p, np.nan)] for p in PHASES},
        }
    )


def _lead(steps: Maybe[pd.DataFrame], light_steps: Maybe[pd.DataFrame]) -> float:
    if not steps:
        return float("nan")
    marked = light_steps.get()
    lead = marked.loc[marked["steady"] & (marked["lead_ns"] >= 0), "lead_ns"]
    return float(lead.mean()) if len(lead) else float("nan")


@per_rank
def step_series(
    steps: Maybe[pd.DataFrame],
    light_steps: Maybe[pd.DataFrame],
    timing: Maybe[Timing],
    on_training_thread: Maybe[pd.DataFrame],
) -> pd.DataFrame:
    """Return the run's steps in order, thinned alike on all ranks: step, kind, times and phases in ns, and three flags.

    From the light layer; where there is none, from the trace, with the wait in the loader as fetch_ns.
    """
    if steps:
        frame = light_steps.get()
        columns = ["step", "kind", "start_ns", "dur_ns", *(f"{p}_ns" for p in PHASES), "steady", "profiled", "first"]
        stride = -(-len(frame) // MOST_ROWS)
        thinned: pd.DataFrame = frame.loc[frame["step"].to_numpy() % stride == 0, columns].astype({"kind": "str"})
        return thinned
    t = timing.get()
    if t.unit != "step":
        raise NotMeasured("nothing marks the steps")
    thread = on_training_thread.get()
    fetch = host.cover(thread, host.is_kind(thread, "fetch"))
    return pd.DataFrame(
        {
            "step": t.numbers,
            "kind": "train",
            "start_ns": t.windows[:, 0],
            "dur_ns": t.windows[:, 1] - t.windows[:, 0],
            "fetch_ns": [iv.total(iv.clip(fetch, int(s), int(e))) for s, e in t.host_windows],
            **dict.fromkeys(("forward_ns", "backward_ns", "optimizer_ns"), -1),
            "steady": True,
            "profiled": 1,
            "first": 0,
        }
    )


def check_marked(step_means: pd.DataFrame) -> None:
    """Raise NotMeasured where no step is known, but only the whole trace."""
    if (step_means["unit"] != "step").any():
        raise NotMeasured("nothing marks the steps: starting up cannot be told from training (prof.step() marks them)")


@across_ranks
def mean_step_ns(step_means: pd.DataFrame) -> float:
    """Return the mean steady step of the run: the mean over its ranks, in ns."""
    return float(step_means["step_ns"].mean())


@across_ranks
def of_step(step_means: pd.DataFrame) -> str:
    """Say what shares are of: "of each step", or of the whole trace where nothing marks a step."""
    return "of each step" if (step_means["unit"] == "step").all() else "of the traced time"
