"""What a change would make of a rank's step: the replay of its traced steps, brought to the steps that were not traced.

The profiler makes each call that it sees longer by about the same time: a phase took 1.3 to 2.0 µs longer for each
operator, call of the runtime or named range in it on the host of an H200, and 3 to 7 µs on those of two H100. So a
forward pass of thousands of operators takes 1.5 to 2.5 times as long while it is traced, and a fused optimizer as long
as ever. The step log knows how long each phase is in the other steps: what a call costs is fitted to that, phase by
phase (`calibrated`). What no cost of calls explains (a machine that was slow meanwhile, the profiler's work at a step's
end) is taken from all of the phase alike. Waits for data, which differ from step to step, are brought to their mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from msgspec import Struct
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import RANK, Frame, RankFacts, needs, per_rank, within_rank
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.host import in_calls, is_on_device, on_training_thread
from dlprof.analysis.timeline.replay import HostClock, Kept, Replay, replay_of
from dlprof.analysis.timeline.steps import Timing, timing

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


def usual_ns(facts: Mapping[str, Any]) -> float:
    """Return what a traced call usually costs on the host of a rank with these facts, ns."""
    each = ((facts.get("window") or {}).get("modules") or {}).get("ns_each")
    return min(_OF_A_RANGE * float(each), _MOST_NS) if each else _USUAL_NS


class TracedCalls(Struct, frozen=True):
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


# From one operator to the next Python takes 5 to 50 µs in a model's code. Where no thread is in an operator or in a
# call of the runtime for longer than this, the script does something else.
PAUSE_NS = 100_000

# What remains between two kernels of a captured graph: NVIDIA measures 0.5 µs ("Getting Started with CUDA Graphs",
# kernels of 2.9 µs that take 3.4 µs each); twice that here.
GRAPH_GAP_NS = 1_000

# What the host costs is not known where the replay of the untouched job is further than this from the measured step.
REPRODUCED = 0.03

# A device that works for so much of the step is what the host waits for, in whatever phase.
_FILLED = 0.85

# A step is known to this many standard errors of its mean.
LEAST_NOISE = 2.0

# What can gain no more than this share of a step is not worth a replay.
LITTLE = 0.005


class HostTime(Struct, frozen=True):
    """What the host did in the replayed steps; disjoint sets of its time."""

    fetch: iv.Intervals  # the training thread in next() of its loader
    calls: iv.Intervals  # any thread in an operator or a call of the runtime, or on its way from one to the next
    python: iv.Intervals  # none of these for longer than PAUSE_NS: the script's own Python


class WhatIf(Struct, frozen=True, dict=True):
    """A rank's steps, and what a change would make of them."""

    replay: Replay
    host: HostTime
    phases: Mapping[str, iv.Intervals]  # the training thread's, and the rest; fetching is in none of them
    fetch_left: float  # the mean wait for data of the steady steps ÷ that of the replayed ones
    measured_ns: float  # the mean steady step

    @property
    def marked(self) -> bool:
        """Whether forward and backward passes are marked: then what is in no phase lies between them."""
        return len(self.phases["forward"]) > 0 and len(self.phases["backward"]) > 0

    @cached_property
    def step_ns(self) -> float:
        """The mean step that the replay gives without any change."""
        return self.replay.step_ns(self._kept())

    def gain_ns(
        self,
        *,
        fetch: float = 1.0,
        python: float = 1.0,
        calls: float = 1.0,
        other: Sequence[Kept] = (),
        durations: NDArray[np.int64] | None = None,
        free: Sequence[int] = (),
        gap_ns: int | None = None,
        at_once: Sequence[int] = (),
    ) -> float:
        """Return how much shorter the mean steady step would be, ns: 0 at least, and the step at most.

        `fetch`, `python` and `calls` are the shares that are left of the host's time, and `other` of any sets of it,
        which then count there alone; the rest as in Replay.step_ns.
        """
        kept = self._kept(fetch, python, calls, other)
        gone = 1 - self._ratio(self.replay.step_ns(kept, durations, free, gap_ns, at_once))
        return min(max(gone, 0.0), 1.0) * self.measured_ns

    def host_ns(self, times: iv.Intervals) -> float:
        """Return how long the host is in a set of its time in the mean step, as the replay has it, ns."""
        return self.replay.host_ns(self._kept(), [times])[0]

    def left(
        self, durations: NDArray[np.int64], calls: float = 1.0, *, fetch: float = 1.0, python: float = 1.0
    ) -> float:
        """Return how long the step is with other durations of its work, as a multiple of the step.

        `calls`, `fetch` and `python` are the shares that are left of the host's time, as in `gain_ns`.
        """
        return self._ratio(self.replay.step_ns(self._kept(fetch, python, calls), durations))

    def _ratio(self, then_ns: float) -> float:
        return then_ns / self.step_ns if self.step_ns > 0 else 1.0

    def _kept(
        self, fetch: float = 1.0, python: float = 1.0, calls: float = 1.0, other: Sequence[Kept] = ()
    ) -> list[Kept]:
        cut = iv.merge(*(times for times, _ in other)) if other else iv.EMPTY
        shares = (
            (self.host.fetch, fetch * self.fetch_left),
            (self.host.python, python),
            (self.host.calls, calls),
        )
        return [*((iv.subtract(times, cut), share) for times, share in shares if share != 1.0), *other]


@within_rank
def what_if(
    replay_of: Replay = needs(replay_of),
    timing: Timing = needs(timing),
    on_training_thread: Frame = needs(on_training_thread),
    in_calls: iv.Intervals = needs(in_calls),
    spans: Frame = needs(schema.SPANS),
    is_on_device: NDArray[np.bool_] = needs(is_on_device),
    rank: RankFacts = needs(RANK),
) -> WhatIf:
    """Return a rank's steps, ready for changes; raise NotMeasured as `replay_of` does."""
    did, phases = _host_time(on_training_thread, in_calls, replay_of), _phases(on_training_thread, replay_of.host)
    if timing.source != "steps":
        return WhatIf(replay_of, did, phases, 1.0, timing.step_ns)
    traced = iv.total(did.fetch) / replay_of.steps
    fetch_left = timing.phases.get("fetch", 0.0) / traced if traced else 1.0
    untraced = {p: ns for p, ns in timing.phases.items() if p != "fetch"}
    untraced["rest"] = max(timing.step_ns - sum(timing.phases.values()), 0.0)

    def replayed(clock: HostClock) -> dict[str, float]:
        return dict(
            zip(phases, replay_of.clocked(clock).host_ns([(did.fetch, fetch_left)], [*phases.values()]), strict=True)
        )

    calls = traced_calls(spans, is_on_device, did.calls, phases)
    filled = replay_of.durations.sum() >= _FILLED * replay_of.steps * timing.step_ns
    clock = calibrated(calls, untraced, replay_of.steps, replayed, usual_ns(rank.facts), filled=bool(filled))
    return WhatIf(replay_of.clocked(clock), did, phases, fetch_left, timing.step_ns)


@per_rank
def replayed_steps(what_if: WhatIf = needs(what_if), timing: Timing = needs(timing)) -> pd.DataFrame:
    """Return one row: replay_ns, the mean step of the replay without any change; step_ns, that of the steady steps; and
    off, by which share the first is longer, as far as the error of the second does not explain it.
    """
    error = LEAST_NOISE * timing.noise_ns / max(timing.step_ns, 1.0)
    off = what_if.step_ns / max(what_if.measured_ns, 1.0) - 1
    beyond = float(np.sign(off) * max(abs(off) - error, 0.0))
    return pd.DataFrame([{"replay_ns": what_if.step_ns, "step_ns": what_if.measured_ns, "off": beyond}])


def _phases(on_training_thread: pd.DataFrame, window: tuple[int, int]) -> dict[str, iv.Intervals]:
    """Return the training thread's phases between two instants, fetching left out, and the rest; disjoint."""
    left = np.array([window], dtype=np.int64)
    left = iv.subtract(left, host.cover(on_training_thread, host.is_kind(on_training_thread, "fetch")))
    found = {}
    for phase in ("forward", "backward", "optimizer"):
        during = host.cover(on_training_thread, host.is_named(on_training_thread, f"dlprof::{phase}"))
        found[phase] = iv.intersect(left, during)
        left = iv.subtract(left, during)
    return {**found, "rest": left}


def _host_time(on_training_thread: pd.DataFrame, in_calls: iv.Intervals, replay: Replay) -> HostTime:
    whole = np.array([replay.host], dtype=np.int64)
    waits = iv.merge(np.array([[w.begin, w.end] for w in replay.waits], dtype=np.int64).reshape(-1, 2))
    fetching = host.cover(on_training_thread, host.is_kind(on_training_thread, "fetch"))
    fetch = iv.subtract(iv.intersect(fetching, whole), waits)
    free = iv.subtract(iv.subtract(whole, fetch), waits)
    between = iv.subtract(free, in_calls)
    python = between[between[:, 1] - between[:, 0] > PAUSE_NS]
    return HostTime(fetch, iv.subtract(free, python), python)
