"""What a change would make of a rank's step: the replay of its traced steps, brought to the steps that were not traced.

The profiler makes every call that it sees longer, so that the host of the traced steps is slower than the job's. Where
the step log has the steps without it, all calls are taken to be shorter by one share, the one with which the replay
takes as long as those steps. Waits for data, which differ from step to step, are brought to their mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import within_rank
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.replay import Kept, Replay
from dlprof.analysis.timeline.steps import Timing

# From one operator to the next Python takes 5 to 50 µs in a model's code. Where no thread is in an operator or in a
# call of the runtime for longer than this, the script does something else.
PAUSE_NS = 100_000

# What remains between two kernels of a captured graph: NVIDIA measures 0.5 µs ("Getting Started with CUDA Graphs",
# kernels of 2.9 µs that take 3.4 µs each); twice that here.
GRAPH_GAP_NS = 1_000

# What can gain no more than this share of a step is not worth a replay.
LITTLE = 0.005

# No profiler makes calls longer than by this factor (×1.9 was measured for the smallest operators on a CPU).
_MOST_SLOWED = 4.0
_BISECTIONS = 7
_NEAR = 0.003


@dataclass(frozen=True)
class HostTime:
    """What the host did in the replayed steps; disjoint sets of its time."""

    fetch: iv.Intervals  # the training thread in next() of its loader
    calls: iv.Intervals  # any thread in an operator or a call of the runtime, or on its way from one to the next
    python: iv.Intervals  # none of these for longer than PAUSE_NS: the script's own Python


@dataclass(frozen=True)
class WhatIf:
    """A rank's steps, and what a change would make of them."""

    replay: Replay
    host: HostTime
    fetch_left: float  # the mean wait for data of the steady steps ÷ that of the replayed ones
    calls_left: float  # the share of the calls' time that is left without the profiler
    measured_ns: float  # the mean steady step

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

    def left(
        self, durations: NDArray[np.int64], calls: float = 1.0, *, fetch: float = 1.0, python: float = 1.0
    ) -> float:
        """Return how long the step is with other durations of its work, and of its calls, as a multiple of the step.

        `fetch`, `python`: the same of the wait for data, and of the script's own Python.
        """
        return self._ratio(self.replay.step_ns(self._kept(fetch, python, calls), durations))

    def ratio(self, durations: NDArray[np.int64], *, fetch: float = 1.0, host: float = 1.0) -> float:
        """Return the same with only a share left of the wait for data, and of the host's calls and Python."""
        return self._ratio(self.replay.step_ns(self._kept(fetch, host, host), durations))

    def _ratio(self, then_ns: float) -> float:
        return then_ns / self.step_ns if self.step_ns > 0 else 1.0

    def _kept(
        self, fetch: float = 1.0, python: float = 1.0, calls: float = 1.0, other: Sequence[Kept] = ()
    ) -> list[Kept]:
        cut = iv.merge(*(times for times, _ in other)) if other else iv.EMPTY
        shares = (
            (self.host.fetch, fetch * self.fetch_left),
            (self.host.python, python),
            (self.host.calls, calls * self.calls_left),
        )
        kept = [(iv.subtract(times, cut), share) for times, share in shares if share != 1.0]
        for times, share in other:
            calls_of_it = iv.intersect(times, self.host.calls)
            kept += [(calls_of_it, share * self.calls_left), (iv.subtract(times, calls_of_it), share)]
        return kept


@within_rank
def what_if(replay_of: Replay, timing: Timing, on_training_thread: pd.DataFrame, in_calls: iv.Intervals) -> WhatIf:
    """Return a rank's steps, ready for changes; raise NotMeasured as `replay_of` does."""
    did = _host_time(on_training_thread, in_calls, replay_of)
    fetch_left = calls_left = 1.0
    if timing.source == "steps":
        traced = iv.total(did.fetch) / replay_of.steps
        fetch_left = timing.phases.get("fetch", 0.0) / traced if traced else 1.0
        calls_left = _calls_left(replay_of, did, fetch_left, timing.step_ns)
    return WhatIf(replay_of, did, fetch_left, calls_left, timing.step_ns)


def _host_time(on_training_thread: pd.DataFrame, in_calls: iv.Intervals, replay: Replay) -> HostTime:
    whole = np.array([replay.host], dtype=np.int64)
    waits = iv.merge(np.array([[w.begin, w.end] for w in replay.waits], dtype=np.int64).reshape(-1, 2))
    fetching = host.cover(on_training_thread, host.is_kind(on_training_thread, "fetch"))
    fetch = iv.subtract(iv.intersect(fetching, whole), waits)
    free = iv.subtract(iv.subtract(whole, fetch), waits)
    between = iv.subtract(free, in_calls)
    python = between[between[:, 1] - between[:, 0] > PAUSE_NS]
    return HostTime(fetch, iv.subtract(free, python), python)


def _calls_left(replay: Replay, did: HostTime, fetch_left: float, measured_ns: float) -> float:
    """Return the share of the calls' time with which the replay takes as long as the steps that were not traced."""
    fetch = (did.fetch, fetch_left)
    if replay.step_ns([fetch]) <= measured_ns * (1 + _NEAR):
        return 1.0
    low, high = 1 / _MOST_SLOWED, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        longer = replay.step_ns([fetch, (did.calls, middle)]) > measured_ns
        low, high = (low, middle) if longer else (middle, high)
    return (low + high) / 2
