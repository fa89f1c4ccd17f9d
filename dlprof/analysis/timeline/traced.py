"""The traced steps of a rank, on the host's clock and on the device's.

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

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Frame, Maybe, maybe, needs, within_rank
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import device_work, has_device
from dlprof.analysis.timeline.launches import UNKNOWN, Launches, launches
from dlprof.errors import NotMeasured

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


@dataclass(frozen=True)
class TracedSteps:
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
