"""The host's time in a trace, brought to the steps that were not traced.

The profiler makes each call that it sees longer by about the same time: a phase took 1.3 to 2.0 µs longer for each
operator, call of the runtime or named range in it on the host of an H200, and 3 to 7 µs on those of two H100. So a
forward pass of thousands of operators takes 1.5 to 2.5 times as long while it is traced, and a fused optimizer as long
as ever. The step log knows how long each phase is in the other steps: what a call costs is fitted to that, phase by
phase. What no cost of calls explains (a machine that was slow meanwhile, the profiler's work at a step's end) is taken
from all of the phase alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import intervals as iv
from dlprof.analysis.timeline import host

# What a traced call costs where no phase shows it: on the H200's host; as a multiple of what opening and closing a
# range took, which the recorder times (1.1 to 6 in 40 phases of 18 jobs, 2.3 in the median); and what none exceeds.
_USUAL_NS, _OF_A_RANGE = 1_500.0, 2.3
_MOST_NS = 8_000.0

# At least this share of the time with calls is left (×1.9 was measured for the smallest operators).
_LEAST_LEFT = 0.25

# At least this share of a phase is left: a phase that takes five times as long while it is traced is not understood.
_LEAST_OF_PHASE = 0.2

# One piece of the clock has so many ends of calls; within it, the profiler's share is constant.
_A_PIECE = 16

# A phase with fewer calls than these shows by chance alone what one costs.
_ENOUGH_CALLS = 10

_ROUNDS = 6


@dataclass(frozen=True)
class HostClock:
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


def usual_ns(facts: Mapping[str, Any]) -> float:
    """Return what a traced call usually costs on the host of a rank with these facts, ns."""
    each = ((facts.get("window") or {}).get("modules") or {}).get("ns_each")
    return min(_OF_A_RANGE * float(each), _MOST_NS) if each else _USUAL_NS


AS_TRACED = HostClock(np.empty(0, dtype=np.int64), np.empty(0))


@dataclass(frozen=True)
class TracedCalls:
    """The host's time in pieces, in order: `edges`, one more than pieces; how many calls are made in each; in which
    phase it is, by its place in `phases`; and how much of it is spent in calls, ns.
    """

    edges: NDArray[np.int64]
    calls: NDArray[np.float64]
    phase: NDArray[np.int64]
    spent: NDArray[np.float64]
    phases: tuple[str, ...]

    def clock(self, cost_ns: NDArray[np.float64], left: NDArray[np.float64]) -> HostClock:
        """Return the clock of a host without what each traced call costs in each phase, and with a share `left` of the
        rest of the phase.
        """
        lost = np.minimum(self.calls * cost_ns[self.phase], (1 - _LEAST_LEFT) * self.spent)
        lost += (1 - left[self.phase]) * (np.diff(self.edges) - lost)
        return HostClock(self.edges, np.concatenate(([0.0], np.cumsum(lost))))

    def of_phase(self) -> NDArray[np.float64]:
        """Return how many calls each phase has."""
        return np.bincount(self.phase, self.calls, len(self.phases)).astype(float)


def traced_calls(
    spans: pd.DataFrame, on_device: NDArray[np.bool_], in_calls: iv.Intervals, phases: Mapping[str, iv.Intervals]
) -> TracedCalls:
    """Divide the time of some disjoint phases of the host into pieces; `in_calls`: when any thread is in a call."""
    whole = iv.merge(*phases.values())
    called = ~on_device & host.is_kind(spans, "op", "runtime", "annotation", "communication")
    start = spans["start_ns"].to_numpy()[called]
    ends = np.sort(np.concatenate((start, start + spans["dur_ns"].to_numpy()[called])))
    ends = ends[(ends >= whole[0, 0]) & (ends < whole[-1, 1])] if len(whole) else ends[:0]
    edges = np.unique(np.concatenate([ends[::_A_PIECE], in_calls.ravel(), *(p.ravel() for p in phases.values())]))
    edges = edges[(edges >= whole[0, 0]) & (edges <= whole[-1, 1])] if len(whole) else edges[:0]
    if len(edges) < 2:
        return TracedCalls(np.empty(0, np.int64), np.empty(0), np.empty(0, np.int64), np.empty(0), tuple(phases))
    middle = (edges[:-1] + edges[1:]) // 2
    phase = np.full(len(middle), len(phases), dtype=np.int64)
    for place, times in enumerate(phases.values()):
        phase[iv.holds(times, middle)] = place
    number = np.diff(np.searchsorted(ends, edges)) / 2
    # What lies between two steps that do not follow each other is in no phase.
    return TracedCalls(edges, number, phase, iv.per_slot(in_calls, edges).astype(float), (*phases, ""))


def calibrated(
    calls: TracedCalls,
    untraced_ns: Mapping[str, float],
    steps: int,
    replayed_ns: Callable[[HostClock], Mapping[str, float]],
    usual_ns: float,
    *,
    filled: bool,
) -> HostClock:
    """Return the clock with which a replay has the phases of the steps that were not traced.

    `untraced_ns`: the mean length of each phase in those; `replayed_ns` returns the same of a replay of `steps` steps
    with a clock. A phase that is longer untraced waits there for its device (the queue is full): what its calls cost is
    then taken from the others, or `usual_ns`. Where the device is `filled` any phase may wait, and no call costs less
    than usual.
    """
    number = calls.of_phase()
    cost, left = np.full(len(number), _USUAL_NS), np.ones(len(number))
    cost[-1] = 0.0
    logged = [i for i, p in enumerate(calls.phases) if p in untraced_ns]
    known = [i for i in logged if number[i] >= _ENOUGH_CALLS * steps]
    waits = np.zeros(len(number), dtype=bool)
    for _ in range(_ROUNDS):
        found = replayed_ns(calls.clock(cost, left))
        for i in known:
            longer = found[calls.phases[i]] - untraced_ns[calls.phases[i]]
            new = cost[i] + longer * steps / number[i]
            waits[i] = new < 0
            cost[i] = min(max(new, 0.0), _MOST_NS)
    shown = [cost[i] for i in known if not waits[i]]
    like = float(np.median(shown)) if shown else usual_ns
    for i in range(len(number) - 1):
        if waits[i] or i not in known:
            cost[i] = like
        if filled:
            cost[i] = max(cost[i], usual_ns)
    for _ in range(_ROUNDS):
        found = replayed_ns(calls.clock(cost, left))
        for i in logged:
            now, then = found[calls.phases[i]], untraced_ns[calls.phases[i]]
            left[i] = min(max(left[i] * then / now, _LEAST_OF_PHASE), 1.0) if now > 0 else 1.0
    return calls.clock(cost, left)
