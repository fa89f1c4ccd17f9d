"""What a change makes of steps that were not traced: calls as short as the profiler left them, waits as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.engine import RankData
from dlprof.analysis.timeline.what_if import what_if
from dlprof.read.run import open_run
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS, light


def bound(steps: int = 4) -> dict[str, Any]:
    """Make steps of 1 ms in which the host launches ten kernels of 20 µs, one every 100 µs, all of it in operators."""
    events: list[Any] = []
    for n in range(steps):
        t = n * MS
        events.append(traces.step(n, t, MS))
        for k in range(10):
            at = t + 100_000 * k
            events += [traces.op("aten::mm", at, 99_000)]
            events += traces.launched("gemm", at + 50_000, at + 60_000, 20_000, 100 * n + k + 1)
    return traces.trace(*events, world_size=1)


def recorded(folder: Path, made: dict[str, Any], step: int, **said: int) -> RankData:
    rows = [light(n, step, start=traces.BASE_NS + n * MS, device_step_ns=step, **said) for n in range(40)]
    return RankData(open_run(runs.recorded(folder, (made, rows, runs.GPU))).ranks[0])


def test_calls_are_as_short_as_the_steps_that_were_not_traced(tmp_path: Path) -> None:
    # Twenty calls a step, in 1 ms: each may be 5 µs shorter without the profiler.
    asked = recorded(tmp_path / "run", bound(), step=900_000).once(what_if)
    assert asked.step_ns == pytest.approx(900_000, rel=0.01)
    assert asked.measured_ns == 900_000


def test_without_a_light_layer_the_traced_steps_count(tmp_path: Path) -> None:
    asked = runs.rank_of(tmp_path, bound()).once(what_if)
    assert asked.fetch_left == 1.0
    assert asked.step_ns == pytest.approx(MS, rel=0.001)


def test_calls_without_time_leave_the_devices_own(tmp_path: Path) -> None:
    asked = recorded(tmp_path / "run", bound(), step=900_000).once(what_if)
    # Ten kernels of 20 µs, and the gaps of a graph: 0.2 ms and little more of 0.9.
    assert asked.gain_ns(calls=0.0, gap_ns=1_000) == pytest.approx(700_000, rel=0.05)
    assert asked.gain_ns() == 0


def test_waits_for_data_are_brought_to_their_mean(tmp_path: Path) -> None:
    events: list[Any] = []
    for n in range(4):
        t = n * MS
        events += [
            traces.step(n, t, MS),
            traces.fetch(t, 500_000),
            traces.launched("gemm", t + 510_000, t + 520_000, 400_000, 10 * n + 1),
            traces.call("cudaStreamSynchronize", t + 530_000, 400_000, 10 * n + 2),
        ]
    asked = recorded(tmp_path / "run", traces.trace(*events, world_size=1), step=750_000, fetch_ns=250_000).once(
        what_if
    )
    assert asked.fetch_left == pytest.approx(0.5)
    assert asked.step_ns == pytest.approx(750_000, rel=0.01)
    assert asked.gain_ns(fetch=0.0) == pytest.approx(250_000, rel=0.02)


def test_the_scripts_python_is_no_call(tmp_path: Path) -> None:
    events: list[Any] = []
    for n in range(4):
        t = n * MS
        events += [
            traces.step(n, t, MS),
            traces.op("aten::mm", t, 100_000),
            traces.launched("gemm", t + 50_000, t + 60_000, 200_000, n + 1),
        ]
    asked = runs.rank_of(tmp_path, traces.trace(*events, world_size=1)).once(what_if)
    # 0.9 ms of each are Python; without, the kernel of 0.2 ms sets the pace.
    assert asked.gain_ns(python=0.0) == pytest.approx(800_000, rel=0.05)
    assert asked.gain_ns(calls=0.0) == pytest.approx(100_000, rel=0.1)


def test_a_longer_step_has_more_left_than_all(tmp_path: Path) -> None:
    asked = runs.rank_of(tmp_path, bound()).once(what_if)
    longer = asked.replay.durations * 10
    assert asked.left(longer) == pytest.approx(2.0, rel=0.05)
