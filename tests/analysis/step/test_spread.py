"""The standard error of a mean step: of its own scatter, of its drift, and of a single step."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from dlprof.analysis.step.spread import spread
from dlprof.analysis.timeline.steady import STRETCHES, standard_error
from tests.fixtures import runs, traces
from tests.fixtures.runs import CPU, MS, light, measured, recorded


def of(folder: Path, durations: list[int]) -> dict[str, float]:
    path = recorded(folder / "run", (None, [light(n, dur) for n, dur in enumerate(durations)], CPU))
    (row,) = measured(path, spread).frame(spread).to_dict("records")
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
    (row,) = measured(path, spread).frame(spread).to_dict("records")
    assert row["steps"] == 1
    assert math.isnan(row["noise_ns"])
