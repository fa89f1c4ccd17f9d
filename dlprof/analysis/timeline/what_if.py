"""What a change would make of a rank's step: the replay of its traced steps, brought to the steps that were not traced.

The profiler makes every call that it sees longer, so that the host of the traced steps is slower than the job's. Where
the step log has the steps without it, the replay's host keeps time by `host_clock`, which was fitted to those steps.
Waits for data, which differ from step to step, are brought to their mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import RANK, Frame, RankFacts, needs, per_rank, within_rank
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.host import in_calls, is_on_device, on_training_thread
from dlprof.analysis.timeline.host_clock import HostClock, calibrated, traced_calls, usual_ns
from dlprof.analysis.timeline.launched_work import replay_of
from dlprof.analysis.timeline.replay import Kept, Replay
from dlprof.analysis.timeline.steps import Timing, timing

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
        with_clock = replace(replay_of, clock=clock)
        return dict(zip(phases, with_clock.host_ns([(did.fetch, fetch_left)], [*phases.values()]), strict=True))

    calls = traced_calls(spans, is_on_device, did.calls, phases)
    filled = replay_of.durations.sum() >= _FILLED * replay_of.steps * timing.step_ns
    clock = calibrated(calls, untraced, replay_of.steps, replayed, usual_ns(rank.facts), filled=bool(filled))
    return WhatIf(replace(replay_of, clock=clock), did, phases, fetch_left, timing.step_ns)


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
