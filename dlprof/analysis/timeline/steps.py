"""The steps of a rank: how long the mean steady one takes, which of them the trace holds, and where these lie on the
host's clock and on the device's.

Steadiness is decided here and in `steady`, and nowhere else. A steady step trains (it has a backward pass or an
optimizer step), holds neither the first batch of an epoch nor an epoch's end, was not slowed by the profiler, was not
the one in which the job was suspended, and comes after the warm-up. The mean, not the median, stands for them: a stall
every k steps is part of what training costs.

A GPU job is asynchronous: the device works on a step long after the host has left it. So the work of a step is what was
launched within its host window, and on the device the step lasts from where the device turns to that work to where it
turns to the next step's:

    B[i] = min(b[i], max(h[i], e[i − 1]))

with h[i] the start of the host window, b[i] the start of the first work of step i on the stream that computes most, and
e[i − 1] the end of all work of earlier steps. Where the host runs ahead, B[i] is the end of the earlier work. Where the
job synchronises in every step, it is the host's own mark, so that a device that idles at the start of a step (the
loader is late, say) idles in that step. The last window ends at max(h[n], e[n − 1]).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import pandas as pd
from msgspec import Struct
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import RANK, Frame, Maybe, RankFacts, across_ranks, maybe, needs, per_rank, within_rank
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import (
    UNKNOWN,
    DeviceSets,
    Launches,
    device_sets,
    device_work,
    has_device,
    launches,
)
from dlprof.analysis.timeline.host import on_training_thread
from dlprof.analysis.timeline.stalls import Pattern, patterns
from dlprof.analysis.timeline.steady import ENOUGH, light_steps, standard_error, steady_steps, suspended
from dlprof.errors import NotMeasured
from dlprof.units import count, duration

# Marks of consecutive steps leave some µs between them; a gap longer than this share of a step separates steps that do
# not follow each other.
_GAP_SHARE = 0.05

# The profiler's start empties the queue, and the host then runs ahead. A step belongs to that transition where the
# device turned to it at once (within this share of its length), and the host gained so much in it.
_TRANSITION = 0.05

# Marks of a profiler, torch's and dlprof's in an export of nsys.
_PROFILERS = ("ProfilerStep#", "dlprof::step ")

# The trace holds the whole first or last step if it has this share of the usual amount of work, which is so
# many kernels and copies at least.
_WHOLE, _FEW = 0.9, 10

# If the first work in a trace began so long after its launch, and this share of the trace, the device was at work of
# before it.
_EARLIER_NS, _EARLIER = 1_000_000, 0.02

# The step of work that was launched between two steps that do not follow each other (in validation, say).
NO_STEP = -2

# The traced steps on the host: windows (n, 2) in ns, their numbers, and "step", or "trace" for the whole trace.
Marks = tuple[iv.Intervals, NDArray[np.int64], str]


class TracedSteps(Struct, frozen=True):
    """The traced steps in order, n of them; times in ns.

    `host` and `windows`, both (n, 2): where the training thread was in each step, and where the device was; the same
    where the trace holds no device. `numbers` are the steps' own, counted from 0 where nothing numbers them, and
    empty where nothing marks a step and the whole trace stands for one. `lag_ns` is how far the device is behind the
    host where each step begins: b[i] − h[i]; NaN for a step that launched nothing. `launched_in` has for each row of
    `device.device_work` the step that launched it: −1 before the first, n after the last, NO_STEP between two that do
    not follow each other. `linked` is the share of that work whose launch the trace holds.
    """

    host: iv.Intervals
    windows: iv.Intervals
    numbers: NDArray[np.int64]
    unit: str
    lag_ns: NDArray[np.float64]
    launched_in: NDArray[np.int64]
    linked: float

    @property
    def launches(self) -> NDArray[np.bool_]:
        """Which steps launched device work; all, where the trace holds no device or does not link its work."""
        launched = ~np.isnan(self.lag_ns)
        return launched if launched.any() else ~launched

    @property
    def whole(self) -> NDArray[np.bool_]:
        """Which steps have all of their device work in the trace, which may begin or end amid that of a step.

        All, where the trace does not link the work: it is then counted where it began.
        """
        n = len(self.windows)
        inside = self.launched_in[(self.launched_in >= 0) & (self.launched_in < n)]
        works = np.bincount(inside, minlength=n)
        found, some = np.ones(n, dtype=bool), np.flatnonzero(works)
        if self.linked and len(some) > 2 and np.median(works[some]) >= _FEW:
            least = _WHOLE * float(np.median(works[some]))
            found[some[[0, -1]]] = works[some[[0, -1]]] >= least
        return found

    @property
    def settled(self) -> NDArray[np.bool_]:
        """Which steps are like those of the job: all but the first ones, in which the host only gains its lead.

        The device then waits for launches that are queued in time later on. At least one step is settled.
        """
        behind = np.append(self.windows[:, 0] - self.host[:, 0], self.windows[-1:, 1] - self.host[-1:, 1])
        least = _TRANSITION * (self.windows[:, 1] - self.windows[:, 0])
        others = ((behind[:-1] > least) | (np.diff(behind) <= least))[:-1]
        return np.append(np.maximum.accumulate(others), np.ones(min(len(least), 1), dtype=bool))


@within_rank
def step_marks(
    spans: Frame = needs(schema.SPANS),
    traced_steps: Frame = needs(schema.TRACED_STEPS),
) -> Marks:
    """Return the steps on the host as the trace has them, else the whole trace."""
    start = traced_steps["start_ns"].to_numpy()
    # Where two steps overlap (they are marked in a hook), the later one's start ends the earlier.
    end = np.minimum(start + traced_steps["dur_ns"].to_numpy(), np.append(start[1:], UNKNOWN)[: len(start)])
    lasting = end > start
    if lasting.any():
        return np.column_stack((start, end))[lasting], traced_steps["step"].to_numpy()[lasting], "step"
    if not len(spans):
        raise NotMeasured("the trace is empty")
    whole = [spans["start_ns"].min(), (spans["start_ns"] + spans["dur_ns"]).max()]
    return np.array([whole], dtype=np.int64), np.empty(0, dtype=np.int64), "trace"


@within_rank
def main_stream(device_work: Frame = needs(device_work)) -> NDArray[np.bool_]:
    """Return which rows of the device's work lie on the stream that computes most."""
    lane = device_work["lane"].cat.codes.to_numpy()
    dur = device_work["dur_ns"].to_numpy(dtype=float)
    took = np.bincount(lane, weights=np.where(host.is_kind(device_work, "kernel"), dur, dur * 1e-6))
    main: NDArray[np.bool_] = lane == (int(np.argmax(took)) if len(took) else -1)
    return main


@within_rank
def trace_window(
    step_marks: Maybe[Marks] = maybe(step_marks),
    spans: Maybe[Frame] = maybe(schema.SPANS),
    has_device: bool = needs(has_device),
    launches: Maybe[Launches] = maybe(launches),
    device_work: Maybe[Frame] = maybe(device_work),
    main_stream: Maybe[NDArray[np.bool_]] = maybe(main_stream),
) -> TracedSteps:
    """Return the traced steps of a rank; none of them where it has no trace."""
    none = np.empty(0, dtype=np.int64)
    if not step_marks:
        return TracedSteps(iv.EMPTY, iv.EMPTY, none, "step", np.empty(0), none, 0.0)
    marks, numbers, unit = step_marks.get()
    no_lag = np.full(len(marks), np.nan)
    if not has_device:
        return TracedSteps(marks, marks, numbers, unit, no_lag, none, 0.0)
    work, called, by_profiler = (
        device_work.get(),
        launches.get(),
        bool(spans and host.is_named(spans.get(), *_PROFILERS).any()),
    )
    linked = float(called.known.mean())
    alone = len(marks) == 1 and not by_profiler
    launched_in = np.zeros(len(work), dtype=np.int64) if alone else _launched_in(called, work, marks)
    if unit == "step" and linked:
        windows, lag = _on_device(work, main_stream.get(), marks, launched_in)
        if len(marks) == 1:
            windows[0, 0] = max(windows[0, 0], _turned_to_it(work, main_stream.get(), called, marks))
        return TracedSteps(marks, windows, numbers, unit, lag, launched_in, linked)
    windows = marks.copy()
    if by_profiler:
        # The profiler empties the device's queue where it starts, so all work in the trace is of the steps that it
        # marks: until that is done, the last one lasts. Other marks leave the work of a last step unmarked.
        windows[-1, 1] = max(windows[-1, 1], int((work["start_ns"] + work["dur_ns"]).max()))
    if unit == "trace" and linked:
        windows[0, 0] = _turned_to_it(work, main_stream.get(), called, marks)
    return TracedSteps(marks, windows, numbers, unit, no_lag, launched_in, linked)


def _turned_to_it(work: pd.DataFrame, main_stream: NDArray[np.bool_], called: Launches, marks: iv.Intervals) -> int:
    """Return when the device turns to the work of a trace of one step or none, if it was at earlier work until then.

    So it is where the first work on the main stream was launched long before it began, and hardly anything ran
    meanwhile: what ran is not in the trace.
    """
    start, dur = work["start_ns"].to_numpy(), work["dur_ns"].to_numpy()
    main = np.flatnonzero(main_stream & called.known)
    if not len(main):
        return int(marks[0, 0])
    first = main[np.argmin(start[main])]
    waited = int(start[first] - called.returned[first])
    ran = int(dur[start < start[first]].sum())
    late = waited >= max(_EARLIER_NS, _EARLIER * (marks[0, 1] - marks[0, 0])) and ran <= _EARLIER * waited
    return int(start[first]) if late else int(marks[0, 0])


def _launched_in(launches: Launches, device_work: pd.DataFrame, marks: iv.Intervals) -> NDArray[np.int64]:
    """Return the step that launched each piece of device work.

    Work whose launch is not in the trace goes with its neighbour on the same stream, which runs in order. Where no
    launch is, work belongs to the step in whose time it began, and to the last one after that.
    """
    began = device_work["start_ns"].to_numpy()
    if not launches.known.any():
        return np.minimum(_step_at(marks, began), len(marks) - 1)
    step = _step_at(marks, launches.called)
    if launches.known.all():
        return step
    lane = device_work["lane"].cat.codes.to_numpy()
    # What nothing known comes before was launched before the trace began, as far as a known one follows.
    neighbours = pd.Series(step).where(launches.known).groupby(lane).ffill().fillna(-1).astype(np.int64)
    linked = pd.Series(launches.known).groupby(lane).transform("any")
    return np.where(linked, neighbours, _step_at(marks, began))


def _step_at(marks: iv.Intervals, at: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the step whose host window holds each instant: −1 before the first, n after the last, or NO_STEP."""
    length = float(np.median(marks[:, 1] - marks[:, 0]))
    step = np.searchsorted(marks[:, 0], at, side="right") - 1
    next_mark = np.append(marks[1:, 0], marks[-1:, 1])
    near = np.where(next_mark - marks[:, 1] <= _GAP_SHARE * length, next_mark, marks[:, 1])
    beyond = (step >= 0) & (at >= near[np.maximum(step, 0)])
    return np.where(beyond, np.where(step == len(marks) - 1, len(marks), NO_STEP), step)


def _on_device(
    device_work: pd.DataFrame, main_stream: NDArray[np.bool_], marks: iv.Intervals, launched_in: NDArray[np.int64]
) -> tuple[iv.Intervals, NDArray[np.float64]]:
    """Return the steps' windows on the device and their lags, as the file's head defines them."""
    n = len(marks)
    start = device_work["start_ns"].to_numpy()
    end = start + device_work["dur_ns"].to_numpy()
    of_any = (launched_in >= 0) & (launched_in < n)
    first, elsewhere = np.full(n, UNKNOWN), np.full(n, UNKNOWN)
    for found, of in ((first, of_any & main_stream), (elsewhere, of_any)):
        np.minimum.at(found, launched_in[of], start[of])
    first = np.where(first < UNKNOWN, first, elsewhere)
    # The end of all earlier work, also of an exchange on another stream, by the step that follows it.
    done = np.full(n + 1, np.iinfo(np.int64).min)
    earlier = (launched_in >= -1) & (launched_in < n)
    np.maximum.at(done, launched_in[earlier] + 1, end[earlier])
    done = np.maximum.accumulate(done)
    edges = np.append(np.minimum(first, np.maximum(marks[:, 0], done[:-1])), max(marks[-1, 1], done[-1]))
    edges = np.maximum.accumulate(edges)
    windows = np.column_stack((edges[:-1], edges[1:]))
    # Between steps that do not follow each other, a window ends where its own step does.
    apart = np.flatnonzero(marks[1:, 0] - marks[:-1, 1] > _GAP_SHARE * np.median(marks[:, 1] - marks[:, 0]))
    own_end = np.maximum(marks[apart, 1], done[apart + 1])
    windows[apart, 1] = np.maximum(np.minimum(windows[apart, 1], own_end), windows[apart, 0])
    return windows, np.where(first < UNKNOWN, first - marks[:, 0], np.nan)


# Traced kernels may take a little longer than others.
LEAST_OF_BUSY = 0.97

# The first steps of a trace do what is done once if they take so many times as long as the usual one.
_COLD = 2.0

NOT_MARKED = "without step markers, starting up cannot be told from training (prof.step() marks them)"

# The most rows of the series that a rank passes on: enough for any screen and for a replay, a few kilobytes.
MOST_ROWS = 2_000

PHASES = ("fetch", "forward", "backward", "optimizer")


class Timing(Struct, frozen=True, dict=True):
    """How long the steady steps of one rank are, and where in the trace its steps are.

    `lengths` are those of the steady steps in ns, from the step log (`source` "steps") or of those that were traced
    ("trace"). `windows` are the steady traced steps, (n, 2) in ns: on the device's clock where the trace holds a device
    (`trace_window`), else on the host's; `host_windows` the same steps on the host's. `numbers` are their step
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
