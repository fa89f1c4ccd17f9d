"""The work of a trace, ready to be replayed: what each launch needed, and what the host waited for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis.engine import Frame, needs, within_rank
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import NO_DEVICE_WORK, NOT_IN_STEPS, device_work
from dlprof.analysis.timeline.idle import LATENCY_NS
from dlprof.analysis.timeline.launches import NOT_LINKED, UNKNOWN, Launches, launches
from dlprof.analysis.timeline.replay import NEVER, WAIT_NS, Replay, Wait
from dlprof.analysis.timeline.steady import ENOUGH
from dlprof.analysis.timeline.steps import NOT_MARKED, Timing, timing
from dlprof.analysis.timeline.traced import TracedSteps, main_stream, trace_window
from dlprof.errors import NotMeasured

# So much device work is replayed at most: whole steps, at least one.
MOST_WORK = 12_000

# A call that launches takes some µs. One that takes this long waits because the queue is full, or for its device.
_LONG_LAUNCH_NS = 100_000

# Where too little of the trace shows it: from a launch to its start on an idle device, and from one queued kernel to
# the next.
_START_NS = 8_000
_NEXT_NS = 1_500

# Traces of whole µs show work that starts a little before what it waits for has ended.
_CLOCK_NS = 1_000

# Work that waited this much of its delay after other work had ended waited for that, or for what comes right behind it.
_OF_DELAY = 0.25

# Calls that return when the device has done what was queued, in CUDA's and HIP's words.
SYNCHRONISING = tuple(
    f"{runtime}{call}Synchronize" for runtime in ("cuda", "hip", "cu") for call in ("Stream", "Device", "Event", "Ctx")
)
_OF_ALL_STREAMS = tuple(name for name in SYNCHRONISING if "Device" in name or "Ctx" in name)
_OF_EVENTS = tuple(name for name in SYNCHRONISING if "Event" in name)
_NOT_LAUNCHES = ("cudaMalloc", "hipMalloc", "cudaFree", "hipFree", "cuModuleLoad", "cudaHostAlloc", "cuLibraryLoad")


@within_rank
def replay_of(
    trace_window: TracedSteps = needs(trace_window),
    timing: Timing = needs(timing),
    device_work: Frame = needs(device_work),
    launches: Launches = needs(launches),
    spans: Frame = needs(schema.SPANS),
    main_stream: NDArray[np.bool_] = needs(main_stream),
) -> Replay:
    """Return a rank's settled traced steps, ready to be replayed.

    Raises NotMeasured without a device, marked steps, or launches that are linked to what they launched.
    """
    if not len(device_work):
        raise NotMeasured(NO_DEVICE_WORK)
    if timing.unit != "step":
        raise NotMeasured(NOT_MARKED)
    if not trace_window.linked:
        raise NotMeasured(NOT_LINKED)
    first, last = _block(timing.chosen, trace_window.launched_in)
    rows = np.flatnonzero((trace_window.launched_in >= first) & (trace_window.launched_in <= last))
    if not len(rows):
        raise NotMeasured(NOT_IN_STEPS)
    begin, end = int(trace_window.host[first, 0]), int(trace_window.host[last, 1])
    waits = _waits(spans, device_work, launches, rows, begin, end)
    start, dur = device_work["start_ns"].to_numpy()[rows], device_work["dur_ns"].to_numpy()[rows]
    lane = device_work["lane"].cat.codes.to_numpy()
    called = _called(launches, rows, start, waits)
    before, previous = _previous(device_work, rows)
    # Work with no launch in the trace follows what is before it on its stream; the first of a stream, its host.
    called = np.where((called == NEVER) & (previous == NEVER), start - 1, called)
    launched, follows = called > NEVER, previous > NEVER
    between = start - previous
    typical = between[(called < previous - LATENCY_NS) & (between <= LATENCY_NS)]
    next_ns = max(int(np.median(typical)), 0) if len(typical) >= ENOUGH else _NEXT_NS
    # On an idle device all of a launch's delay is its latency; behind other work it does not show.
    fresh = (called >= previous) & launched
    start_ns = int(np.median((start - called)[fresh])) if fresh.sum() >= ENOUGH else _START_NS
    latency = np.minimum(start - called, np.where(fresh, LATENCY_NS, min(start_ns, LATENCY_NS)))
    gap = np.where(follows, np.minimum(between, next_ns), 0)
    explained = np.maximum(called + latency, np.where(follows, previous + gap, NEVER))
    needs, needs_gap = _needed(start, start + dur, lane[rows], explained)
    # The waits before a launch, and before the work began: at one instant launches come first, and waits last.
    ends = np.array([w.end for w in waits], dtype=np.int64)
    order = np.argsort(ends, kind="stable")
    return Replay(
        rows=rows,
        durations=dur,
        waits=tuple(waits),
        steps=last - first + 1,
        begin=int(trace_window.windows[first, 0]),
        host=(begin, end),
        _waited=np.searchsorted(ends[order], called, side="left"),
        _until=np.searchsorted(ends[order], start, side="left"),
        _wait_order=order.tolist(),
        _called=called,
        _start=start,
        _stream=lane[rows].astype(np.int64),
        _main=int(lane[main_stream][0]),
        _latency=np.where(launched, latency, 0),
        _gap=gap,
        _needs=needs,
        _needs_gap=needs_gap,
        _residual=np.where((explained > NEVER) & (needs < 0), start - explained, 0),
        _before=before,
    )


def _block(chosen: NDArray[np.int64], launched_in: NDArray[np.int64]) -> tuple[int, int]:
    """Return the first and the last of the longest run of steady steps, shortened to what is replayed at most."""
    longest = max(np.split(chosen, np.flatnonzero(np.diff(chosen) > 1) + 1), key=len)
    pieces = np.bincount(launched_in[launched_in >= 0], minlength=int(longest[-1]) + 1)[longest]
    fit = int(np.searchsorted(np.cumsum(pieces), MOST_WORK, side="right"))
    return int(longest[0]), int(longest[max(fit, 1) - 1])


def _called(
    launches: Launches, rows: NDArray[np.int64], start: NDArray[np.int64], waits: list[Wait]
) -> NDArray[np.int64]:
    """Return from when on each piece of work was in the queue; NEVER: not known, so that nothing waits for it."""
    called, returned = launches.called[rows], launches.returned[rows]
    # A call that waits for a full queue queues its work when it returns. A copying call queues first and then waits.
    blocked = np.isin(called, [w.begin for w in waits if w.from_start])
    at = np.where(blocked & (returned - called > _LONG_LAUNCH_NS), returned - 1, called)
    return np.where(called < UNKNOWN, np.minimum(at, start - 1), NEVER)


def _previous(work: pd.DataFrame, rows: NDArray[np.int64]) -> tuple[dict[int, int], NDArray[np.int64]]:
    """Return the end of all work before all rows, by stream, and of that before each row on its own (NEVER: none)."""
    lane = work["lane"].cat.codes
    reach = (work["start_ns"] + work["dur_ns"]).groupby(lane).cummax()
    before = reach.iloc[: rows[0]].groupby(lane.iloc[: rows[0]]).last()
    previous = reach.groupby(lane).shift(fill_value=NEVER).to_numpy()[rows]
    return {int(str(stream)): int(end) for stream, end in before.items()}, previous


def _needed(
    start: NDArray[np.int64], end: NDArray[np.int64], lane: NDArray[np.integer[Any]], explained: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for each piece of work the place of the work on another stream that it waited for (−1: none), and how long
    after the end of that it started.

    It is taken to wait for the work that ended last before it started, if that ended just before, or if most of its
    delay is before that end and nothing else explains it. It may have waited for free multiprocessors.
    """
    order = np.argsort(end, kind="stable")
    at = np.searchsorted(end[order], start + _CLOCK_NS, side="right") - 1
    last = order[np.maximum(at, 0)]
    after, delay = start - end[last], start - explained
    found = (at >= 0) & (lane[last] != lane) & (delay > _NEXT_NS) & (end[last] > explained)
    found &= (after <= LATENCY_NS) | (after <= _OF_DELAY * delay)
    found &= last < np.arange(len(last))  # what ends within a ns of its start may stand behind
    return np.where(found, last, -1), np.where(found, after, 0)


def _waits(
    spans: pd.DataFrame, device_work: pd.DataFrame, launches: Launches, rows: NDArray[np.int64], begin: int, end: int
) -> list[Wait]:
    """Find the calls between two instants in which the host waits for its device, or would if it were faster.

    A call that synchronises always waits for what was launched before it; a slow host, as the profiler makes it, finds
    that done. A wait for an event is only known where it lasts: the event may be of any work before.
    """
    called, took = spans["start_ns"].to_numpy(), spans["dur_ns"].to_numpy()
    first, last = np.searchsorted(called, (begin, end))
    near = spans.iloc[first:last]
    synchronises = host.is_named(near, *SYNCHRONISING)
    of_all, of_event = host.is_named(near, *_OF_ALL_STREAMS), host.is_named(near, *_OF_EVENTS)
    lasts = took[first:last] >= WAIT_NS
    ids = spans["launch"].to_numpy()[first:last]
    start = device_work["start_ns"].to_numpy()
    ends = start + device_work["dur_ns"].to_numpy()
    order = np.argsort(ends, kind="stable")
    launch = device_work["launch"].to_numpy()
    pageable = host.is_kind(device_work, "copy") & ~host.is_one_of(device_work["memory"], "pinned")
    row_of = dict(zip(launch[pageable].tolist(), np.flatnonzero(pageable).tolist(), strict=True))
    home = pageable & host.is_one_of(device_work["copy"], "DtoH")
    copies = host.is_among(ids, launch[home])
    calls = np.flatnonzero(host.is_kind(near, "runtime") & (lasts | (synchronises & ~of_event) | copies))
    # In order of their launches, and of all that was launched until then the last to end.
    by_launch = np.argsort(launches.called, kind="stable")
    launched = launches.called[by_launch]
    latest = by_launch[_last_to_end(ends[by_launch])] if len(by_launch) else by_launch
    place = np.full(len(device_work), -1, dtype=np.int64)
    place[rows] = np.arange(len(rows))
    names = near["name"].array
    found = []
    for call in calls.tolist():
        name, at, until = str(names[call]), int(called[first + call]), int(called[first + call] + took[first + call])
        row, from_start, after = row_of.get(int(ids[call]), -1), False, 0
        if synchronises[call]:
            before = int(np.searchsorted(launched, at)) - 1
            row = int(latest[before]) if before >= 0 else -1
            if lasts[call]:
                # What ended last before the call returned, whichever stream or event it waited for.
                row = int(order[max(int(np.searchsorted(ends[order], until + 1, side="right")) - 1, 0)])
                if ends[row] < at:
                    continue
            waits = row >= 0
        elif row >= 0:
            # The call returns when the last piece is on its way: a little before the copy ends.
            waits = at <= ends[row] <= until + _LONG_LAUNCH_NS
        else:
            from_start = True
            row = int(np.searchsorted(start, until, side="right")) - 1
            begins = until - at >= _LONG_LAUNCH_NS and ids[call] >= 0 and not name.startswith(_NOT_LAUNCHES)
            waits = begins and row >= 0 and start[row] >= at and launch[row] != ids[call]
        if waits:
            after = until - int(start[row] if from_start else ends[row])
            after = after if ends[row] >= at or from_start else min(until - at, WAIT_NS)
            found.append(Wait(at, until, int(place[row]), after, from_start, bool(of_all[call]), name))
    return found


def _last_to_end(ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each place the place of the largest value up to there."""
    places = np.arange(len(ends))
    return np.maximum.accumulate(np.where(ends >= np.maximum.accumulate(ends), places, 0))
