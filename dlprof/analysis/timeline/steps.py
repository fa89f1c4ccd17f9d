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
from dlprof.analysis.timeline.steady import ENOUGH, standard_error, suspended
from dlprof.analysis.timeline.traced import TracedSteps
from dlprof.errors import NotMeasured

# Traced kernels may take a little longer than others.
LEAST_OF_BUSY = 0.97

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
