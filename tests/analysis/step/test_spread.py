"""How sure the mean step is (its own scatter, its drift, a single step), and whether the traced steps are like it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.engine import RankData
from dlprof.analysis.step.savings import spread, window_likeness
from dlprof.analysis.timeline.steady import STRETCHES, standard_error
from dlprof.analysis.timeline.steps import timing
from dlprof.read.run import open_run
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS, light


def of(folder: Path, durations: list[int]) -> dict[str, float]:
    path = runs.recorded(folder / "run", (None, [light(n, dur) for n, dur in enumerate(durations)], runs.CPU))
    (row,) = runs.measured(path, spread).frame(spread).to_dict("records")
    return {str(k): float(v) for k, v in row.items()}


def test_steps_that_scatter_have_the_error_of_their_mean(tmp_path: Path) -> None:
    durations = [100 * MS + (MS if n % 2 else -MS) for n in range(103)]
    row = of(tmp_path, durations)
    steady = np.array(durations[-int(row["steps"]) :], dtype=float)
    assert row["step_ns"] == pytest.approx(steady.mean())
    assert row["noise_ns"] == pytest.approx(standard_error(steady))
    assert [row[f"q{i}"] for i in range(4)] == [99 * MS, pytest.approx(100 * MS, abs=MS), 101 * MS, 101 * MS]


def test_a_drift_is_more_than_the_single_steps_tell(tmp_path: Path) -> None:
    durations = [100 * MS + n * MS // 10 for n in range(203)]
    row = of(tmp_path, durations)
    steady = np.array(durations[-int(row["steps"]) :], dtype=float)
    means = np.array([part.mean() for part in np.array_split(steady, STRETCHES)])
    assert row["noise_ns"] == pytest.approx(standard_error(means))
    assert row["noise_ns"] > 3 * standard_error(steady)


def test_of_a_single_step_nothing_is_known(tmp_path: Path) -> None:
    path = runs.foreign(tmp_path / "one", traces.training(steps=1, world_size=1))
    (row,) = runs.measured(path, spread).frame(spread).to_dict("records")
    assert row["steps"] == 1
    assert math.isnan(row["noise_ns"])


def likeness(folder: Path, before: int, after: int, made: dict[str, Any], profiled: int = 4) -> dict[str, float]:
    """Return the row of a job of 20 steps of `before` ns, a window of 2 ms steps, and 20 of `after`."""
    lengths = [before] * 20 + [2 * MS] * profiled + [after] * 20
    steps = [light(n, ns, device_step_ns=ns, profiled=int(20 <= n < 20 + profiled)) for n, ns in enumerate(lengths)]
    rank = RankData(open_run(runs.recorded(folder / "run", (made, steps, runs.GPU))).ranks[0])
    (row,) = rank.once(window_likeness).to_dict("records")
    return {str(name): float(value) for name, value in row.items() if name != "longer"}


def test_how_long_traced_steps_are_and_those_after_them(tmp_path: Path) -> None:
    made = traces.ahead(4, host=2 * MS, busy=1 * MS, synchronises=True)
    row = likeness(tmp_path, before=1_600_000, after=1_920_000, made=made)
    assert row["ratio"] == pytest.approx(2 * MS / 1_760_000, rel=0.02)
    assert row["after"] == pytest.approx(1.2)
    assert (row["after_noise"], row["linked"], row["left_out"], row["without_work"]) == (0, 1, 0, 0)


def test_a_pause_now_and_then_is_no_profiler_that_stays(tmp_path: Path) -> None:
    made = traces.ahead(4, host=2 * MS, busy=1 * MS, synchronises=True)
    steps = [light(n, MS, device_step_ns=MS, profiled=int(20 <= n < 24)) for n in range(60)]
    for n in (30, 40, 50):
        steps[n] |= {"dur_ns": 30 * MS, "device_step_ns": 30 * MS}
    rank = RankData(open_run(runs.recorded(tmp_path / "run", (made, steps, runs.GPU))).ranks[0])
    assert rank.once(window_likeness)["after"].iloc[0] == 1.0


def test_steps_that_are_left_out_and_work_without_a_launch_are_counted(tmp_path: Path) -> None:
    made = traces.ahead(4, host=1 * MS, busy=2 * MS)
    for event in made["traceEvents"]:
        if event["cat"] == "cuda_runtime" and event["args"]["correlation"] == 31:
            event["args"].pop("correlation")
    rank = runs.rank_of(tmp_path, made)
    (row,) = rank.once(window_likeness).to_dict("records")
    assert row["linked"] == pytest.approx(7 / 8)
    assert row["left_out"] == 1
    assert math.isnan(row["ratio"])
    assert math.isnan(row["after"])


def test_a_step_that_launches_nothing_is_no_step_of_the_job(tmp_path: Path) -> None:
    events: list[Any] = []
    for n in range(6):
        events.append(traces.step(n, n * 5 * MS, 5 * MS))
        if n != 3:
            events += traces.launched("gemm", n * 5 * MS, n * 5 * MS + 10_000, 4 * MS, n + 1)
    rank = runs.rank_of(tmp_path, traces.trace(*events, world_size=1))
    assert rank.once(window_likeness)["without_work"].tolist() == [1]
    assert rank.once(timing).numbers.tolist() == [0, 1, 2, 4, 5]
    result = diagnose(open_run(tmp_path), [], jobs=1)
    assert any("1 traced step launched nothing" in warning for warning in result.run.warnings)


def test_a_cpu_job_has_no_row(tmp_path: Path) -> None:
    made = traces.trace(traces.step(0, 0, MS), traces.op("aten::mm", 0, MS), device="", backend="")
    assert not len(runs.rank_of(tmp_path, made).once(window_likeness))
