"""The host's clock without the profiler: what a traced call costs is fitted to the untraced steps, phase by phase."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlprof.analysis.engine import RankData
from dlprof.analysis.timeline.host_clock import HostClock, TracedCalls, calibrated, usual_ns
from dlprof.analysis.timeline.what_if import WhatIf, what_if
from dlprof.read.run import open_run
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS, light

US = 1_000


def phase(name: str, at: int, calls: int, each: int, first: int) -> list[Any]:
    """Make a phase of operators one after the other, each with a launch and a kernel of 1 µs in its middle."""
    events: list[Any] = [traces.annotation(f"dlprof::{name}", at, calls * each)]
    for k in range(calls):
        began = at + k * each
        events += [traces.op("aten::mul", began, each - US)]
        events += traces.launched("tiny", began + each // 2, began + each // 2 + 6 * US, US, first + k)
    return events


def traced(folder: Path, forward: int, optimizer: int, step: int) -> WhatIf:
    """Trace steps of 40 + 40 + 2 calls (10, 10 and 100 µs each); the step log has other phases without the profiler."""
    events: list[Any] = []
    for n in range(4):
        at, ids = n * MS, 1_000 * n
        events.append(traces.step(n, at, MS))
        events += phase("forward", at, 40, 10 * US, ids + 1)
        events += phase("backward", at + 400 * US, 40, 10 * US, ids + 101)
        events += phase("optimizer", at + 800 * US, 2, 100 * US, ids + 201)
    made = traces.trace(*events, world_size=1)
    log: dict[str, int] = {"forward_ns": forward, "backward_ns": 300 * US, "optimizer_ns": optimizer}
    steps = [
        light(n, step, start=traces.BASE_NS + (n - 20) * 10 * MS, device_step_ns=step, **log) for n in range(40, 80)
    ]
    return RankData(open_run(runs.recorded(folder / "run", (made, steps, runs.GPU))).ranks[0]).once(what_if)


def test_each_phase_is_as_long_as_in_the_untraced_steps(tmp_path: Path) -> None:
    found = traced(tmp_path, forward=200 * US, optimizer=198 * US, step=698 * US)
    lengths = {name: found.host_ns(times) / US for name, times in found.phases.items() if name != "rest"}
    # 200 µs less for 80 calls, 100 less for as many, next to nothing for 4: not one factor for all of them.
    assert lengths == pytest.approx({"forward": 200, "backward": 300, "optimizer": 198}, rel=0.05)
    assert found.step_ns == pytest.approx(found.measured_ns, rel=0.02)


def test_a_phase_that_waits_in_the_other_steps_shows_nothing_of_a_call(tmp_path: Path) -> None:
    # Forward lasts longer untraced than traced, as the queue is full there: the backward pass shows what calls cost.
    found = traced(tmp_path, forward=700 * US, optimizer=200 * US, step=1_200 * US)
    taken = 400 * US - found.host_ns(found.phases["forward"])
    assert taken == pytest.approx(100 * US, rel=0.1)


def one_phase(calls: float, length: int, spent: int) -> TracedCalls:
    return TracedCalls(
        np.array([0, length]), np.array([calls]), np.array([0]), np.array([float(spent)]), ("forward", "")
    )


@pytest.mark.parametrize(("facts", "usual"), [({}, 1_500), ({"window": {"modules": {"ns_each": 1_000}}}, 2_300)])
def test_without_a_phase_that_shows_it_a_call_costs_the_usual(facts: dict[str, Any], usual: float) -> None:
    clock = calibrated(one_phase(100, MS, MS), {}, 1, lambda _: {}, usual_ns(facts), filled=False)
    (lost,) = MS - clock(np.array([MS], dtype=np.int64))
    assert lost == pytest.approx(100 * usual)


@pytest.mark.parametrize(
    ("untraced", "filled", "left"),
    [
        (900 * US, False, 900 * US),
        # Where the device is filled, the host may wait for it anywhere: no call costs less than usual.
        (900 * US, True, 850 * US),
        # 8 µs a call are the most, of calls that take 250 µs in all: the rest of the phase is as much shorter.
        (600 * US, False, 600 * US),
        # A fifth of it is left at least.
        (10 * US, False, 160 * US),
    ],
)
def test_a_phase_is_brought_to_its_length(untraced: int, filled: bool, left: int) -> None:
    calls = one_phase(100, MS, 250 * US)

    def replayed(clock: HostClock) -> dict[str, float]:
        return {"forward": float(np.diff(clock(np.array([0, MS])))[0])}

    clock = calibrated(calls, {"forward": untraced}, 1, replayed, 1_500, filled=filled)
    assert replayed(clock)["forward"] == pytest.approx(left, rel=0.02)


def test_no_call_takes_more_than_there_is() -> None:
    clock = one_phase(1_000, 100 * US, 80 * US).clock(np.array([1_500.0, 0.0]), np.ones(2))
    (left,) = clock(np.array([100 * US], dtype=np.int64))
    # A quarter of the time in calls is left, and what is in none of them.
    assert left == pytest.approx(20 * US + 20 * US)
