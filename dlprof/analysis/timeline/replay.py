"""Replays the traced steps of one rank with something changed: time of the host gone, waits gone, kernels shorter.

The model is what CUDA guarantees and no more. The host launches in order. Work begins when it was launched, when the
work before it on its stream has ended, and when what it waited for on another stream has; where none of these explains
its start, it keeps the rest of its delay. A host that waits for its device goes on when the same work is done as in the
recording. Collectives keep their length: what waiting for other ranks costs is settled across ranks (step/savings).

Nothing changed gives the recorded times exactly. The steps are replayed twice in a row, and the second time counts: by
then the host has the lead, or has lost it, that the change leads to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dlprof.analysis import intervals as iv
from dlprof.analysis.timeline.host_clock import AS_TRACED, HostClock

NEVER = -(1 << 62)

# From here on a call that synchronises waits for its device.
WAIT_NS = 20_000

# A set of host time, and the share of it that is left.
Kept = tuple[iv.Intervals, float]


# A run of work (see Replay._runs): its stream, what it adds, its end by its launches, the waits before its launch, what
# its first piece waits for, how long after that it ends, whether it is gone, and its last piece.
_Run = tuple[int, int, int, int, int, int, bool, int]


@dataclass(frozen=True)
class Wait:
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
        ends = np.sort([w.end for w in self.waits])

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
        begin, end = (
            self._host_at(kept, np.array([getattr(w, edge) for w in self.waits], dtype=np.int64)).tolist()
            for edge in ("begin", "end")
        )
        host_begin, host_end = map(int, self._host_at(kept, np.array(self.host, dtype=np.int64)))
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
