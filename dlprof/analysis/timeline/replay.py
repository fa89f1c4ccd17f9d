"""Replays the traced steps of one rank with something changed: time of the host gone, waits gone, kernels shorter.

The model is what CUDA guarantees and no more. The host launches in order. Work begins when it was launched, when the
work before it on its stream has ended, and when what it waited for on another stream has; where none of these explains
its start, it keeps the rest of its delay. A host that waits for its device goes on when the same work is done as in the
recording. Collectives keep their length: what waiting for other ranks costs is settled across ranks (step/savings).

Nothing changed gives the recorded times exactly. The steps are replayed twice in a row, and the second time counts: by
then the host has the lead, or has lost it, that the change leads to.

`replay_of` reads all that off a trace: what each launch needed, and what the host waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Frame, needs, within_rank
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import (
    LATENCY_NS,
    NO_DEVICE_WORK,
    NOT_IN_STEPS,
    NOT_LINKED,
    UNKNOWN,
    Launches,
    device_work,
    launches,
)
from dlprof.analysis.timeline.steady import ENOUGH
from dlprof.analysis.timeline.steps import NOT_MARKED, Timing, TracedSteps, main_stream, timing, trace_window
from dlprof.errors import NotMeasured

NEVER = -(1 << 62)

# From here on a call that synchronises waits for its device.
WAIT_NS = 20_000

# A set of host time, and the share of it that is left.
Kept = tuple[iv.Intervals, float]

# A run of work (see Replay._runs): its stream, what it adds, its end by its launches, the waits before its launch, what
# its first piece waits for, how long after that it ends, whether it is gone, and its last piece.
_Run = tuple[int, int, int, int, int, int, bool, int]


class HostClock(Struct, frozen=True):
    """Tells where an instant of the trace would be on a host that no profiler slows: `lost` ns earlier, from each of
    `at` on, linear between them.
    """

    at: NDArray[np.int64]
    lost: NDArray[np.float64]

    def __call__(self, at: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the instants on that host's clock, ns."""
        if not len(self.at):
            return at
        begin = self.at[0]  # a float cannot hold the ns of a date
        moved: NDArray[np.int64] = at - np.rint(np.interp(at - begin, self.at - begin, self.lost)).astype(np.int64)
        return moved


AS_TRACED = HostClock(np.empty(0, dtype=np.int64), np.empty(0))


class Wait(Struct, frozen=True):
    """A call in which the host waits for its device; `row`: the place of the work that it waits for, −1: earlier work.

    `after_ns`: how long after that it returns. `from_start`: it waits for that work to start (the queue is full), and
    not to end. `everything`: it waits for all streams, of which that work was the last to end.
    """

    begin: int
    end: int
    row: int
    after_ns: int
    from_start: bool
    everything: bool
    name: str


class Replay(Struct, frozen=True, dict=True):
    """Some steps of a rank, ready to be replayed; `rows` are rows of `device.device_work`, in order of their start."""

    rows: NDArray[np.int64]
    durations: NDArray[np.int64]  # of each of them, ns
    waits: tuple[Wait, ...]
    steps: int
    begin: int  # of the steps on the device, ns
    host: tuple[int, int]  # the steps on the host, ns
    _waited: NDArray[np.int64]  # how many waits had ended before each piece of work was launched
    _until: NDArray[np.int64]  # how many waits had ended when it began
    _wait_order: list[int]  # the places of the waits in order of their ends
    _called: NDArray[np.int64]
    _start: NDArray[np.int64]
    _stream: NDArray[np.int64]
    _main: int
    _latency: NDArray[np.int64]
    _gap: NDArray[np.int64]
    _needs: NDArray[np.int64]  # the place of the work on another stream that this one waited for, −1: none
    _needs_gap: NDArray[np.int64]
    _residual: NDArray[np.int64]
    _before: dict[int, int]  # the end of the work before these steps, by stream
    clock: HostClock = AS_TRACED  # the host's, without the profiler

    def step_ns(
        self,
        kept: Sequence[Kept] = (),
        durations: NDArray[np.int64] | None = None,
        free: Sequence[int] = (),
        gap_ns: int | None = None,
        at_once: Sequence[int] = (),
    ) -> float:
        """Return the mean step of the replay, ns.

        `kept`: of these sets of host time (disjoint) only a share is left. `durations`: of each of `rows`; below 0: it
        is no longer there. `free`: waits, by their place, that are no longer waited for. `gap_ns`: the most that lies
        between two queued pieces of work. `at_once`: places of work that starts without the rest of its delay that
        nothing explains, and without waiting for another stream.
        """
        gap = self._gap if gap_ns is None else np.minimum(self._gap, gap_ns)
        dur = self.durations if durations is None else durations.astype(np.int64)
        residual, needs = self._residual.copy(), self._needs.copy()
        residual[list(at_once)], needs[list(at_once)] = 0, -1
        ready = self._host_at(kept, self._called) + self._latency
        return self._run(kept, self._runs(ready, gap, dur, residual, needs), dur, frozenset(free))[0]

    def host_ns(self, kept: Sequence[Kept], times: Sequence[iv.Intervals]) -> list[float]:
        """Return how much of the replay's mean step the host spends in each of some sets of its time, ns."""
        ready = self._host_at(kept, self._called) + self._latency
        runs = self._runs(ready, self._gap, self.durations, self._residual, self._needs)
        shifts = np.array(self._run(kept, runs, self.durations, frozenset())[1], dtype=np.int64)
        ends = np.sort(self._edges[len(self.waits) : -2])

        def at(instants: NDArray[np.int64]) -> NDArray[np.int64]:
            return self._host_at(kept, instants) + shifts[np.searchsorted(ends, instants, side="right")]

        return [float((at(one[:, 1]) - at(one[:, 0])).sum()) / self.steps for one in times]

    def _host_at(self, kept: Sequence[Kept], at: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where instants of the host are without the profiler, with only a share of some sets of time left."""
        now, gone = self.clock(at), np.zeros(len(at))
        for times, share in kept:
            gone += (1 - share) * iv.before(self.clock(times.ravel()).reshape(-1, 2), now)
        moved: NDArray[np.int64] = now - np.rint(gone).astype(np.int64)
        return moved

    def clocked(self, clock: HostClock) -> Replay:
        """Return the same steps with another clock of the host."""
        other = replace(self, clock=clock)
        for name in ("_edges", "_awaited", "_by_stream"):  # no clock changes these
            other.__dict__[name] = getattr(self, name)
        return other

    @cached_property
    def _edges(self) -> NDArray[np.int64]:
        """The begin of each wait, the end of each, and the two of the steps, on the host."""
        return np.array([*(w.begin for w in self.waits), *(w.end for w in self.waits), *self.host], dtype=np.int64)

    @cached_property
    def _awaited(self) -> NDArray[np.bool_]:
        """Whose end, or start, something else waits for."""
        awaited = np.zeros(len(self.rows), dtype=bool)
        awaited[self._needs[self._needs >= 0]] = True
        awaited[[w.row for w in self.waits if w.row >= 0]] = True
        return awaited

    @cached_property
    def _by_stream(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """All work stream by stream, in order, and whether each piece is the first of a run (see `_runs`)."""
        by = np.argsort(self._stream, kind="stable")
        same = np.stack([self._stream, self._waited, self._until])[:, by]
        first = (self._needs >= 0)[by]
        first[1:] |= (same[:, 1:] != same[:, :-1]).any(axis=0) | self._awaited[by][:-1]
        first[:1] = True
        return by, first

    def _runs(
        self,
        ready: NDArray[np.int64],
        gap: NDArray[np.int64],
        dur: NDArray[np.int64],
        residual: NDArray[np.int64],
        needs: NDArray[np.int64],
    ) -> list[list[_Run]]:
        """Return all work as runs, in order of their first pieces, a list for each number of waits that had ended.

        A run is work behind each other on one stream that one shift of the host moves alike, and that nothing outside
        waits for, or is waited for by, but at its first piece and behind its last. Of such a run all that counts is two
        numbers: what it adds to the work before it, and when it ends where its own launches are what it waits for.

        `ready`: when each piece of work could begin after its launch, had no wait taken another time than recorded.
        """
        by, first = self._by_stream
        gone = dur < 0
        # Removed work that a wait refers to needs a start of its own: it is a run by itself.
        alone = gone & self._awaited
        begins = np.flatnonzero(first | alone[by])
        ends = np.append(begins[1:], len(by)) - 1
        adds = np.where(gone, 0, gap + residual + dur)[by]
        total = np.cumsum(adds)
        launched = np.where(gone, NEVER, ready + residual + dur)[by] - total
        head, tail = by[begins], by[ends]
        single = alone[head]
        behind = np.where(single, gap[head], total[ends] - total[begins] + adds[begins])
        launched = np.where(single, ready[head], np.maximum.reduceat(launched, begins) + total[ends])
        lags = self._needs_gap[head] + np.where(single, 0, behind - gap[head])
        other = np.where(gone[head] & ~single, -1, needs[head])
        columns = (self._stream[head], behind, launched, self._waited[head], other, lags, single, tail)
        order = np.argsort(head)
        runs = list(zip(*(column[order].tolist() for column in columns), strict=True))
        cuts = np.searchsorted(self._until[head[order]], np.arange(len(self.waits) + 2)).tolist()
        return [runs[a:b] for a, b in pairwise(cuts)]

    def _run(
        self, kept: Sequence[Kept], runs: Sequence[Sequence[_Run]], dur: NDArray[np.int64], free: frozenset[int]
    ) -> tuple[float, list[int]]:
        """Replay twice in a row; return the mean step of the second time, and by how much the host was shifted in it
        after each number of waits. Plain numbers, for it is the hot loop.
        """
        *edges, host_begin, host_end = self._host_at(kept, self._edges).tolist()
        begin, end = edges[: len(self.waits)], edges[len(self.waits) :]
        ended = [0] * len(dur)
        # A stream may have worked before the steps, and not in them.
        free_at = [NEVER] * (max(int(self._stream.max(initial=0)), *self._before, 0) + 1)
        for on, at in self._before.items():
            free_at[on] = at
        base, shift, boundaries = self.begin, 0, []
        shifts = [0]
        for _ in range(2):
            shifts = [shift]  # of the host, after so many waits
            for several, i in zip(runs, [*self._wait_order, -1], strict=True):
                for on, behind, launched, waits, other, lag, gone, last in several:
                    at = free_at[on] + behind
                    when = launched + shifts[waits]
                    if when > at:
                        at = when
                    if other >= 0:
                        when = ended[other] + lag
                        if when > at:
                            at = when
                    if not gone:
                        free_at[on] = at
                    ended[last] = at
                if i < 0:
                    continue
                wait = self.waits[i]
                until = begin[i] + shift + min(end[i] - begin[i], WAIT_NS)
                if i not in free:
                    if wait.row < 0:
                        released = base + wait.end - self.begin
                    elif wait.from_start:
                        released = ended[wait.row] - max(int(dur[wait.row]), 0) + wait.after_ns
                    else:
                        released = (max(free_at) if wait.everything else ended[wait.row]) + wait.after_ns
                    until = max(until, released)
                shift = until - end[i]
                shifts.append(shift)
            base = max(free_at[self._main], host_end + shift)
            boundaries.append(base)
            shift += host_end - host_begin
        return (boundaries[1] - boundaries[0]) / self.steps, shifts


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
    is_call = host.is_kind(near, "runtime")
    # What neither synchronises nor copies waits for the queue, if for anything, until the work before has begun.
    until = called[first:last] + took[first:last]
    running = np.searchsorted(start, until, side="right") - 1
    begun = (running >= 0) & (ids >= 0) & (took[first:last] >= _LONG_LAUNCH_NS) & ~host.is_named(near, *_NOT_LAUNCHES)
    begun &= (start[running] >= called[first:last]) & (launch[running] != ids) if len(start) else False
    of_copy = host.is_among(ids, launch[pageable])
    calls = np.flatnonzero(is_call & ((lasts & (begun | of_copy | synchronises)) | (synchronises & ~of_event) | copies))
    # In order of their launches, and of all that was launched until then the last to end.
    by_launch = np.argsort(launches.called, kind="stable")
    launched = launches.called[by_launch]
    latest = by_launch[_last_to_end(ends[by_launch])] if len(by_launch) else by_launch
    place = np.full(len(device_work), -1, dtype=np.int64)
    place[rows] = np.arange(len(rows))
    names = near["name"].array
    found = []
    for call in calls.tolist():
        at, until = int(called[first + call]), int(called[first + call] + took[first + call])
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
            from_start, row, waits = True, int(running[call]), bool(begun[call])
        if waits:
            after = until - int(start[row] if from_start else ends[row])
            after = after if ends[row] >= at or from_start else min(until - at, WAIT_NS)
            found.append(Wait(at, until, int(place[row]), after, from_start, bool(of_all[call]), str(names[call])))
    return found


def _last_to_end(ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each place the place of the largest value up to there."""
    places = np.arange(len(ends))
    return np.maximum.accumulate(np.where(ends >= np.maximum.accumulate(ends), places, 0))
