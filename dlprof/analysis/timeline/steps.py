"""The steps of a rank: which are steady, how long the mean one takes, and which of them the trace holds.

Steadiness is decided here and in `steady`, and nowhere else. A steady step trains (it has a backward pass or an
optimizer step), holds neither the first batch of an epoch nor an epoch's end, was not slowed by the profiler, was not
the one in which the job was suspended, and comes after the warm-up. The mean, not the median, stands for them: a stall
every k steps is part of what training costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import RANK, Frame, Maybe, RankFacts, across_ranks, maybe, needs, per_rank, within_rank
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import DeviceSets, device_sets, has_device
from dlprof.analysis.timeline.host import on_training_thread
from dlprof.analysis.timeline.patterns import Pattern, patterns
from dlprof.analysis.timeline.steady import ENOUGH, light_steps, standard_error, steady_steps, suspended
from dlprof.analysis.timeline.traced import TracedSteps, trace_window
from dlprof.errors import NotMeasured
from dlprof.units import count, duration

# Traced kernels may take a little longer than others.
LEAST_OF_BUSY = 0.97

# The first steps of a trace do what is done once if they take so many times as long as the usual one.
_COLD = 2.0

NOT_MARKED = "without step markers, starting up cannot be told from training (prof.step() marks them)"

# The most rows of the series that a rank passes on: enough for any screen and for a replay, a few kilobytes.
MOST_ROWS = 2_000

PHASES = ("fetch", "forward", "backward", "optimizer")


@dataclass(frozen=True)
class Timing:
    """How long the steady steps of one rank are, and where in the trace its steps are.

    `lengths` are those of the steady steps in ns, from the step log (`source` "steps") or of those that were traced
    ("trace"). `windows` are the steady traced steps, (n, 2) in ns: on the device's clock where the trace holds a device
    (`timeline.traced`), else on the host's; `host_windows` the same steps on the host's. `numbers` are their step
    numbers, `chosen` their places among all traced steps. `overhead` is the mean traced step ÷ the mean steady one.
    `phases` are the step log's mean parts of a steady step on the host, ns, empty where it was not recorded. `even` are
    the lengths without what known patterns make some of them longer. `usual` says which of the windows are no long
    steps of a pattern. `left`: how many traced steps are not steady, and why, where no step log says which are.
    """

    lengths: NDArray[np.float64]
    source: str
    unit: str  # "step", or "trace" where nothing marks the steps and the whole trace stands for one
    overhead: float | None
    windows: iv.Intervals
    host_windows: iv.Intervals
    numbers: NDArray[np.int64]
    chosen: NDArray[np.int64]
    phases: Mapping[str, float]
    even: NDArray[np.float64]
    usual: NDArray[np.bool_]
    left: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        """How many steps were timed."""
        return len(self.lengths)

    @cached_property
    def step_ns(self) -> float:
        """The mean step."""
        return float(self.lengths.mean())

    @cached_property
    def noise_ns(self) -> float:
        """The standard error of the mean step. What comes at a known interval is no chance."""
        return standard_error(self.even)

    @property
    def edges(self) -> NDArray[np.int64]:
        """Where the traced steps begin, and where the last one ends: slots for `intervals.per_slot`."""
        return np.append(self.windows[:, 0], self.windows[-1:, 1])


@within_rank
def timing(
    trace_window: TracedSteps = needs(trace_window),
    traced_steps: Maybe[Frame] = maybe(schema.TRACED_STEPS),
    steps: Maybe[Frame] = maybe(schema.STEPS),
    has_device: bool = needs(has_device),
    device_sets: Maybe[DeviceSets] = maybe(device_sets),
    steady_steps: Maybe[Frame] = maybe(steady_steps),
    patterns: Maybe[tuple[Pattern, ...]] = maybe(patterns),
    on_training_thread: Maybe[Frame] = maybe(on_training_thread),
    rank: RankFacts = needs(RANK),
) -> Timing:
    """Return the timing of a rank; raise NotMeasured where neither a step log nor a trace was recorded."""
    found = patterns.or_none() or ()
    chosen, left = _chosen(traced_steps, steps, rank, trace_window, found, on_training_thread)
    windows, unit = trace_window.windows[chosen], trace_window.unit
    lengths = (windows[:, 1] - windows[:, 0]).astype(float)
    source, overhead, phases, even = "trace", None, {}, lengths
    numbers = trace_window.numbers[chosen] if len(trace_window.numbers) else trace_window.numbers
    # Where nothing marks the steps there are no numbers, and one window.
    usual = ~np.isin(numbers, [n for one in found for n in one.steps]) if len(numbers) else np.ones(len(windows), bool)
    steady = steady_steps.get() if steady_steps else None
    if steady is not None and _fits(steady["length_ns"], windows, has_device, device_sets):
        logged = steady["length_ns"].to_numpy()
        even = _even(steady, found)
        if len(lengths) and unit == "step":
            alike = lengths[usual] if usual.any() else lengths
            overhead = float(alike.mean() / (even if usual.any() else logged).mean())
        phases = {p: float(np.maximum(steady[f"{p}_ns"].to_numpy(), 0).mean()) for p in PHASES}
        lengths, source, unit = logged, "steps", "step"
    if not len(lengths):
        raise NotMeasured("no complete training step was recorded")
    return Timing(
        lengths=lengths,
        source=source,
        unit=unit,
        overhead=overhead,
        windows=windows,
        host_windows=trace_window.host[chosen],
        numbers=numbers,
        chosen=chosen,
        phases=phases,
        even=even,
        usual=usual,
        left=left,
    )


def _even(steady_steps: pd.DataFrame, patterns: tuple[Pattern, ...]) -> NDArray[np.float64]:
    """Return the steps' lengths, ns, those of a pattern as long as they would be without what comes at its interval."""
    even, number = steady_steps["length_ns"].to_numpy(dtype=float, copy=True), steady_steps["step"].to_numpy()
    for one in patterns:
        even[np.isin(number, one.steps)] -= one.extra_ns
    return even


def _fits(steady_ns: pd.Series[float], windows: iv.Intervals, has_device: bool, device_sets: Maybe[DeviceSets]) -> bool:
    """Return whether the step log's steady steps, and not the traced ones, stand for the job.

    No step is shorter than what the device does in it: such a mean is of a host that has not waited for its device yet.
    """
    if not len(windows) or not has_device:
        return not len(windows) or len(steady_ns) >= ENOUGH
    sets = device_sets.get()
    busy = iv.total(iv.intersect(iv.merge(sets.computation, sets.copy), iv.merge(windows))) / len(windows)
    return len(steady_ns) >= ENOUGH and bool(steady_ns.to_numpy().mean() >= LEAST_OF_BUSY * busy)


def _chosen(
    traced_steps: Maybe[pd.DataFrame],
    steps: Maybe[pd.DataFrame],
    rank: RankFacts,
    found: TracedSteps,
    patterns: tuple[Pattern, ...],
    on_training_thread: Maybe[pd.DataFrame],
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return the places of the traced steps that are steady and settled, launch work, and hold no stop of the job.

    Nor do they hold what comes between the steps every n-th time: that is known of all steps. And why others are left
    out, where there is no step log.
    """
    if found.unit == "trace" or not len(found.windows):
        earlier = int((found.windows[:, 0] - found.host[:, 0]).sum())
        why = f"the first {duration(earlier)}, in which the device is at work launched before the trace"
        return np.arange(len(found.windows)), (why,) if earlier > 0 else ()
    start, end = found.host[:, 0], found.host[:, 1]
    stopped = suspended(rank, start, end)
    if stopped.all() and len(stopped) > 1:
        stopped = end - start == (end - start).max()  # all are near a stop, as in a window of short steps
    keep = ~stopped
    if traced_steps and steps:
        # An epoch's first or last step, or no training at all.
        log = steps.get()
        odd = np.isin(found.numbers, log.loc[(log["first"] != 0) | (log["kind"] != "train"), "step"].to_numpy())
        keep &= ~odd | odd.all()
    between = [n for one in patterns if not one.trains for n in one.steps]
    left: list[str] = []
    last = len(found.launches) - int(np.argmax(found.launches[::-1]))
    wanted = {
        "at the end, whose work on the device the trace does not hold": np.arange(len(found.launches)) < last,
        "that launched nothing on the device": found.launches,
        "of whose work on the device the trace holds only a part": found.whole,
        "in which the host only gained its lead": found.settled,
        "": ~np.isin(found.numbers, between),
    }
    for why, those in wanted.items():
        if (keep & those).any():
            left += [f"{count(n, 'step')} {why}"] if (n := int((keep & ~those).sum())) and why else []
            keep &= those
    if not steps and keep.any():
        cold = _cold(found, keep, on_training_thread.or_none())
        left += [f"{count(n, 'step')} at the start that took longer than those after"] if (n := int(cold.sum())) else []
        keep &= ~cold
    keep = keep if keep.any() else np.ones(len(keep), dtype=bool)
    return np.flatnonzero(keep), () if steps else tuple(left)


def _cold(found: TracedSteps, keep: NDArray[np.bool_], thread: pd.DataFrame | None) -> NDArray[np.bool_]:
    """Return which of the first steps of a trace do things that are done once: they take longer than later ones.

    Fetching does not count, nor the longest time in which the training thread calls nothing: a job may wait for data in
    any step.
    """
    length = (found.windows[:, 1] - found.windows[:, 0]).astype(float)
    rows, cold = np.flatnonzero(keep), np.zeros(len(length), dtype=bool)

    def leading(length: NDArray[np.float64]) -> int:
        usual = float(np.median(length[rows][len(rows) // 2 :]))
        long = length[rows] > _COLD * usual
        return min(int(np.argmin(long)) if not long.all() else 0, max(len(rows) // 3, 1)) if len(rows) > 1 else 0

    first = leading(length)
    if first and thread is not None:
        fetching = host.cover(thread, host.is_kind(thread, "fetch"))
        length = length - iv.within(fetching, found.host[:, 0], found.host[:, 1])
        called = iv.merge(host.cover(thread, host.is_kind(thread, "op", "runtime", "communication")), fetching)
        silent = iv.subtract(found.host, called)
        of = np.searchsorted(found.host[:, 0], silent[:, 0], side="right") - 1
        longest = np.zeros(len(length))
        np.maximum.at(longest, of, (silent[:, 1] - silent[:, 0]).astype(float))
        first = min(first, leading(np.maximum(length - longest, 0.0)))
    cold[rows[:first]] = True
    return cold


@within_rank
def launched_within(
    trace_window: TracedSteps = needs(trace_window), timing: Timing = needs(timing)
) -> NDArray[np.int64]:
    """Return for each row of `device.device_work` the place of its step among `timing.windows`; −1: none of them.

    Counts of a step (kernels, collectives, bytes) go by this: the step that launched the work.
    """
    # One place more than steps: what was launched after the last of them, or (from the end) in none.
    place = np.full(len(trace_window.windows) + 1, -1, dtype=np.int64)
    place[timing.chosen] = np.arange(len(timing.chosen))
    found: NDArray[np.int64] = place[np.where(trace_window.launched_in < 0, -1, trace_window.launched_in)]
    return found


@per_rank
def step_means(timing: Timing = needs(timing), steady_steps: Maybe[Frame] = maybe(steady_steps)) -> pd.DataFrame:
    """Return one row: how many steady steps, their mean and its standard error in ns, source, unit, overhead, phases.

    lead_ns is from the start of a step to its first forward, fetching not counted. NaN: not known.
    """
    lead = steady_steps.get()["lead_ns"] if steady_steps else pd.Series(dtype=float)
    row = {
        "steps": timing.steps,
        "source": timing.source,
        "unit": timing.unit,
        "step_ns": timing.step_ns,
        "noise_ns": timing.noise_ns,
        "overhead": np.nan if timing.overhead is None else timing.overhead,
        "traced_steps": len(timing.numbers),
        "lead_ns": float(lead[lead >= 0].mean()),
    }
    return pd.DataFrame([row | {f"{p}_ns": timing.phases.get(p, np.nan) for p in PHASES}])


@per_rank
def phases_of_step(timing: Timing = needs(timing), steady_steps: Frame = needs(steady_steps)) -> pd.DataFrame:
    """Return a row for each of PHASES and "rest": phase, ns of the mean steady step, share of it, micro_batches.

    micro_batches: backward passes of a step that takes one optimizer step for several batches, the median. Raises
    NotMeasured where the step log does not stand for the job.
    """
    if timing.source != "steps":
        raise NotMeasured("too few steady steps are in the step log")
    phases = {**timing.phases, "rest": max(timing.step_ns - sum(timing.phases.values()), 0.0)}
    one = steady_steps[(steady_steps["optimizer_steps"] == 1) & (steady_steps["fetches"] > 1)]
    micro = float(one["backwards"].median()) if len(one) > len(steady_steps) / 2 else 1.0
    rows = [(phase, ns, ns / timing.step_ns, micro) for phase, ns in phases.items()]
    return pd.DataFrame(rows, columns=["phase", "ns", "share", "micro_batches"])


@per_rank
def step_series(
    light_steps: Maybe[Frame] = maybe(light_steps),
    timing: Maybe[Timing] = maybe(timing),
    on_training_thread: Maybe[Frame] = maybe(on_training_thread),
) -> pd.DataFrame:
    """Return the run's steps in order, thinned alike on all ranks: step, kind, times and phases in ns, and three flags.

    From the step log; where there is none, from the trace, with the wait in the loader as fetch_ns.
    """
    if light_steps:
        frame = light_steps.get()
        columns = ["step", "kind", "start_ns", "dur_ns", *(f"{p}_ns" for p in PHASES), "steady", "profiled", "first"]
        stride = -(-len(frame) // MOST_ROWS)
        thinned: pd.DataFrame = frame.loc[frame["step"].to_numpy() % stride == 0, columns].astype({"kind": "str"})
        return thinned
    t = timing.get()
    if t.unit != "step":
        raise NotMeasured(NOT_MARKED)
    thread = on_training_thread.get()
    fetch = host.cover(thread, host.is_kind(thread, "fetch"))
    return pd.DataFrame(
        {
            "step": t.numbers,
            "kind": "train",
            "start_ns": t.windows[:, 0],
            "dur_ns": t.windows[:, 1] - t.windows[:, 0],
            "fetch_ns": iv.within(fetch, t.host_windows[:, 0], t.host_windows[:, 1]),
            **dict.fromkeys(("forward_ns", "backward_ns", "optimizer_ns"), -1),
            "steady": True,
            "profiled": 1,
            "first": 0,
        }
    )


def check_marked(step_means: pd.DataFrame) -> None:
    """Raise NotMeasured where no step is known, but only the whole trace."""
    if (step_means["unit"] != "step").any():
        raise NotMeasured(NOT_MARKED)


@across_ranks
def mean_step_ns(step_means: Frame = needs(step_means)) -> float:
    """Return the mean steady step of the run: the mean over its ranks, in ns."""
    return float(step_means["step_ns"].mean())


@across_ranks
def of_step(step_means: Frame = needs(step_means)) -> str:
    """Return what shares are of: "of each step", or of the whole trace where nothing marks a step."""
    return "of each step" if (step_means["unit"] == "step").all() else "of the traced time"
