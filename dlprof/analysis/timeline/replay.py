"""Replays the traced steps of one rank with something changed: time of the host gone, waits gone, kernels shorter.

The model is what CUDA promises and no more. The host launches in order. Work begins when it was launched, when the work
before it on its stream has ended, and when what it waited for on another stream has; where none of these explains its
start, it keeps the rest of its delay. A host that waits for its device goes on when the same work is done as in the
recording. Collectives keep their length: what waiting for other ranks costs is settled across ranks (measures/replay).

Nothing changed gives the recorded times exactly. The steps are replayed twice in a row, and the second time counts: by
then the host has the lead, or has lost it, that the change leads to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Maybe, within_rank
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.idle import LATENCY_NS
from dlprof.analysis.timeline.launches import UNKNOWN, Launches
from dlprof.analysis.timeline.steps import ENOUGH, Timing
from dlprof.analysis.timeline.traced import TracedSteps
from dlprof.errors import NotMeasured

# So much device work is replayed at most: whole steps, at least one.
MOST_WORK = 12_000

# A call that launches takes some µs. One that takes this long waits for room in the queue, or for its device; a call
# that synchronises waits from here on.
_LONG_LAUNCH_NS = 100_000
_WAIT_NS = 20_000

# Where nothing in the trace tells: from a launch to its start on an idle device, and from one queued kernel to the
# next.
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
_NOT_LAUNCHES = ("cudaMalloc", "hipMalloc", "cudaFree", "hipFree", "cuModuleLoad", "cudaHostAlloc", "cuLibraryLoad")

_NEVER = -(1 << 62)

# A run of work (see Replay._runs): its stream, what it adds, its end by its launches, the waits before its launch, whom
# its first piece waits for, how long after that it ends, whether it is gone, and its last piece.
_Run = tuple[int, int, int, int, int, int, bool, int]

# A set of host time, and the share of it that is left.
Kept = tuple[iv.Intervals, float]


@dataclass(frozen=True)
class Wait:
    """A call in which the host waits for its device; `row`: the place of the work that it waits for, −1: earlier work.

    `from_start`: it waits for that work to start (the queue is full), and not to end. `everything`: it waits for all
    streams, of which that work was the last to end.
    """

    begin: int
    end: int
    row: int
    from_start: bool
    everything: bool
    name: str


@dataclass(frozen=True)
class Replay:
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
        host_at = _without(kept)
        begin = host_at(np.array([w.begin for w in self.waits], dtype=np.int64)).tolist()
        end = host_at(np.array([w.end for w in self.waits], dtype=np.int64)).tolist()
        marks = host_at(np.array(self.host, dtype=np.int64)).tolist()
        gap = self._gap if gap_ns is None else np.minimum(self._gap, gap_ns)
        dur = self.durations if durations is None else durations.astype(np.int64)
        ready = host_at(self._called) + self._latency
        residual, needs = self._residual.copy(), self._needs.copy()
        at_once = list(at_once)
        residual[at_once], needs[at_once] = 0, -1
        return self._run(self._runs(ready, gap, dur, residual, needs), marks, begin, end, dur, frozenset(free))

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
        # Of work that is gone and waited for, its start is asked for: it stands alone.
        alone = gone & self._awaited
        first = first | alone[by]
        begins = np.flatnonzero(first)
        ends = np.append(begins[1:], len(by)) - 1
        adds = np.where(gone, 0, gap + residual + dur)[by]
        total = np.cumsum(adds)
        launched = np.where(gone, _NEVER, ready + residual + dur)[by] - total
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
        self,
        runs: Sequence[Sequence[_Run]],
        marks: list[int],
        begin: list[int],
        end: list[int],
        dur: NDArray[np.int64],
        free: frozenset[int],
    ) -> float:
        """Replay twice in a row, and return the mean step of the second time; plain numbers, for it is the hot loop."""
        ended = [0] * len(dur)
        free_at = [_NEVER] * (int(self._stream.max(initial=0)) + 1)
        for on, at in self._before.items():
            free_at[on] = at
        base, shift, boundaries = self.begin, 0, []
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
                until = begin[i] + shift + min(wait.end - wait.begin, _WAIT_NS)
                if i not in free:
                    if wait.row < 0:
                        released = base + wait.end - self.begin
                    elif wait.from_start:
                        released = ended[wait.row] - max(int(dur[wait.row]), 0) + wait.end - int(self._start[wait.row])
                    else:
                        done = max(free_at) if wait.everything else ended[wait.row]
                        released = done + wait.end - int(self._start[wait.row] + self.durations[wait.row])
                    if released > until:
                        until = released
                shift = until - end[i]
                shifts.append(shift)
            base = max(free_at[self._main], marks[1] + shift)
            boundaries.append(base)
            shift += marks[1] - marks[0]
        return (boundaries[1] - boundaries[0]) / self.steps


def _without(kept: Sequence[Kept]) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
    """Return a function from recorded host times to those where only a share of some sets of time is left."""

    def host_at(at: NDArray[np.int64]) -> NDArray[np.int64]:
        gone = np.zeros(len(at))
        for times, share in kept:
            gone += (1 - share) * iv.before(times, at)
        moved: NDArray[np.int64] = at - np.rint(gone).astype(np.int64)
        return moved

    return host_at


@within_rank
def replay_of(
    trace_window: TracedSteps,
    timing: Timing,
    has_device: bool,
    device_work: Maybe[pd.DataFrame],
    launches: Maybe[Launches],
    spans: Maybe[pd.DataFrame],
    main_stream: Maybe[NDArray[np.bool_]],
) -> Replay:
    """Return a rank's settled traced steps, ready to be replayed; raise NotMeasured where the trace does not tell them.

    What it needs is a device, marked steps, and launches that are linked to what they launched.
    """
    if not has_device:
        raise NotMeasured("the trace holds no work of a device")
    if timing.unit != "step" or not trace_window.linked:
        raise NotMeasured(
            "nothing marks the steps" if timing.unit != "step" else "the trace links no launch to its kernel"
        )
    first, last = _block(timing.chosen, trace_window.launched_in)
    inside = (trace_window.launched_in >= first) & (trace_window.launched_in <= last)
    rows = np.flatnonzero(inside)
    work, calls = device_work.get(), launches.get()
    start, dur = work["start_ns"].to_numpy()[rows], work["dur_ns"].to_numpy()[rows]
    lane = work["lane"].cat.codes.to_numpy()
    waits = tuple(
        _waits(spans.get(), device_work.get(), rows, int(trace_window.host[first, 0]), int(trace_window.host[last, 1]))
    )
    called = _called(calls.called[rows], calls.returned[rows], start, waits)
    before, previous = _previous(work, lane, rows)
    # Work with no launch in the trace follows what is before it on its stream; the first of a stream, its host.
    called = np.where((called == _NEVER) & (previous == _NEVER), start - 1, called)
    queued = called < previous - LATENCY_NS
    between = start - previous
    typical = between[queued & (between <= LATENCY_NS)]
    next_ns = max(int(np.median(typical)), 0) if len(typical) >= ENOUGH else _NEXT_NS
    # On an idle device all of a launch's delay is its latency; behind other work nobody sees how long it takes.
    fresh = (called >= previous) & (called > _NEVER)
    start_ns = int(np.median((start - called)[fresh])) if fresh.sum() >= ENOUGH else _START_NS
    latency = np.minimum(start - called, np.where(fresh, LATENCY_NS, min(start_ns, LATENCY_NS)))
    gap = np.where(previous > _NEVER, np.minimum(between, next_ns), 0)
    explained = np.maximum(called + latency, np.where(previous > _NEVER, previous + gap, _NEVER))
    needs, needs_gap = _needed(start, start + dur, lane[rows], explained)
    residual = np.where(needs >= 0, 0, start - explained)
    wait_order, waited, until = _among(called, start, waits)
    return Replay(
        rows=rows,
        durations=dur,
        waits=waits,
        steps=last - first + 1,
        begin=int(trace_window.windows[first, 0]),
        host=(int(trace_window.host[first, 0]), int(trace_window.host[last, 1])),
        _waited=waited,
        _until=until,
        _wait_order=wait_order,
        _called=called,
        _start=start,
        _stream=lane[rows].astype(np.int64),
        _main=int(lane[main_stream.get()][0]),
        _latency=np.where(called > _NEVER, latency, 0),
        _gap=gap,
        _needs=needs,
        _needs_gap=needs_gap,
        _residual=np.where(explained > _NEVER, residual, 0),
        _before=before,
    )


def _block(chosen: NDArray[np.int64], launched_in: NDArray[np.int64]) -> tuple[int, int]:
    """Return the first and the last of the longest run of steady steps, shortened to what is replayed at most."""
    runs = np.split(chosen, np.flatnonzero(np.diff(chosen) > 1) + 1)
    longest = max(runs, key=len)
    pieces = np.bincount(launched_in[launched_in >= 0], minlength=int(longest[-1]) + 1)[longest]
    fit = int(np.searchsorted(np.cumsum(pieces), MOST_WORK, side="right"))
    return int(longest[0]), int(longest[max(fit, 1) - 1])


def _called(
    called: NDArray[np.int64], returned: NDArray[np.int64], start: NDArray[np.int64], waits: Sequence[Wait]
) -> NDArray[np.int64]:
    """Return from when on each piece of work was in the queue; _NEVER: not known, so that nothing waits for it."""
    known = called < UNKNOWN
    # A call that waits for room queues its work when it returns; one that copies has queued it, and waits for it.
    blocked = np.isin(called, [w.begin for w in waits if w.from_start])
    at = np.where(blocked & (returned - called > _LONG_LAUNCH_NS), returned - 1, called)
    return np.where(known, np.minimum(at, start - 1), _NEVER)


def _previous(
    work: pd.DataFrame, lane: NDArray[np.integer[Any]], rows: NDArray[np.int64]
) -> tuple[dict[int, int], NDArray[np.int64]]:
    """Return the end of all work on a row's stream before it (_NEVER: none), and that before all rows, by stream."""
    start = work["start_ns"].to_numpy()
    end = start + work["dur_ns"].to_numpy()
    previous = np.full(len(work), _NEVER)
    before: dict[int, int] = {}
    for one in np.unique(lane):
        mine = np.flatnonzero(lane == one)
        previous[mine[1:]] = np.maximum.accumulate(end[mine])[:-1]
        first = np.searchsorted(mine, rows[0])
        if first:
            before[int(one)] = int(end[mine[:first]].max())
    return before, previous[rows]


def _needed(
    start: NDArray[np.int64], end: NDArray[np.int64], lane: NDArray[np.integer[Any]], explained: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for each piece of work the place of that on another stream whose end it waited for (−1: none), and how
    long after that it started.

    It waited for what ended last before it started, if that was just before, or much sooner than the rest of its delay,
    which nothing else explains: also where it was room on the device that it waited for.
    """
    order = np.argsort(end, kind="stable")
    at = np.searchsorted(end[order], start + _CLOCK_NS, side="right") - 1
    last = order[np.maximum(at, 0)]
    after, delay = start - end[last], start - explained
    found = (
        (at >= 0)
        & (lane[last] != lane)
        & ((after <= LATENCY_NS) | (after <= _OF_DELAY * delay))
        & (delay > _NEXT_NS)
        & (end[last] > explained)
    )
    found &= last < np.arange(len(last))  # what ends within a ns of its start may stand behind
    return np.where(found, last, -1), np.where(found, after, 0)


def _waits(spans: pd.DataFrame, device_work: pd.DataFrame, rows: NDArray[np.int64], begin: int, end: int) -> list[Wait]:
    """Find the calls between two instants in which the host waited for its device."""
    called, took = spans["start_ns"].to_numpy(), spans["dur_ns"].to_numpy()
    first, last = np.searchsorted(called, (begin, end))
    calls = first + np.flatnonzero(host.is_kind(spans.iloc[first:last], "runtime") & (took[first:last] >= _WAIT_NS))
    start = device_work["start_ns"].to_numpy()
    ends = start + device_work["dur_ns"].to_numpy()
    order = np.argsort(ends, kind="stable")
    launch, ids = device_work["launch"].to_numpy(), spans["launch"].to_numpy()
    pageable = host.is_kind(device_work, "copy") & ~host.is_one_of(device_work["memory"], "pinned")
    row_of = dict(zip(launch[pageable].tolist(), np.flatnonzero(pageable).tolist(), strict=True))
    place = np.full(len(device_work), -1, dtype=np.int64)
    place[rows] = np.arange(len(rows))
    names = spans["name"].array
    found = []
    for call in calls.tolist():
        name, at, until = str(names[call]), int(called[call]), int(called[call] + took[call])
        own = row_of.get(int(ids[call]), -1)
        from_start = False
        if name.startswith(SYNCHRONISING):
            row = int(order[max(int(np.searchsorted(ends[order], until + 1, side="right")) - 1, 0)])
            if not at <= ends[row] <= until:
                continue
        elif own >= 0:
            row = own
            # The call returns when the last piece is on its way: a little before the copy ends.
            if not at <= ends[row] <= until + _LONG_LAUNCH_NS:
                continue
        else:
            row = int(np.searchsorted(start, until, side="right")) - 1
            from_start = True
            waits = took[call] >= _LONG_LAUNCH_NS and ids[call] >= 0 and not name.startswith(_NOT_LAUNCHES)
            if not waits or row < 0 or start[row] < at or launch[row] == ids[call]:
                continue
        everything = name.startswith(_OF_ALL_STREAMS)
        found.append(Wait(at, until, int(place[row]), from_start, everything, name))
    return found


def _among(
    called: NDArray[np.int64], start: NDArray[np.int64], waits: Sequence[Wait]
) -> tuple[list[int], NDArray[np.int64], NDArray[np.int64]]:
    """Return the places of the waits in order of their ends, and for each piece of work how many waits had ended before
    its launch and before it began. At one instant launches come first, and waits last.
    """
    ends = np.array([w.end for w in waits], dtype=np.int64)
    order = np.argsort(ends, kind="stable")
    ends = ends[order]
    return order.tolist(), np.searchsorted(ends, called, side="left"), np.searchsorted(ends, start, side="left")
