"""Idle time by its cause on hand-made traces, known to the nanosecond."""

from pathlib import Path

import pytest

from dlprof.errors import NotMeasured
from dlprof.measures.gaps import gaps, small_kernels
from tests import runs, traces
from tests.runs import MS


def test_each_gap_has_its_cause(tmp_path: Path) -> None:
    made = traces.trace(
        traces.step(0, 0, MS),
        traces.op("aten::mm", 0, 200_000),
        traces.launched("first", 0, 0, 100_000, 1),
        # Launched 30 µs after the first had ended, by a host that was in operators all along: late.
        traces.launched("late", 130_000, 140_000, 60_000, 2),
        # Launched while that ran, and begun 5 µs after it: what starting a kernel takes.
        traces.launched("queued", 150_000, 205_000, 95_000, 3),
        # Launched in time, and begun 50 µs late: a dependency.
        traces.launched("dependent", 180_000, 350_000, 50_000, 4),
        # The host was in nothing that is traced from 200 to 600 µs: Python.
        traces.op("aten::mm", 600_000, 390_000),
        traces.launched("last", 600_000, 610_000, 390_000, 5),
    )
    (row,) = runs.rank_of(tmp_path, made).once(gaps.function).to_dict("records")
    assert row == {
        "launching_ns": 40_000 + 10_000,  # [100, 140) and, after Python, [600, 610)
        "python_ns": 200_000,  # [400, 600)
        "overhead_ns": 5_000,
        "dependency_ns": 50_000,
        "kept_ns": 3_000,  # a µs for each of three gaps
        "small_launching_ns": 0,
        "small_overhead_ns": 0,
        "small_kept_ns": 0,
    }


def test_gaps_behind_small_kernels_are_told_apart(tmp_path: Path) -> None:
    made = traces.trace(
        traces.step(0, 0, 200_000),
        traces.op("aten::add", 0, 200_000),
        traces.launched("large", 0, 0, 50_000, 1),
        traces.launched("small", 60_000, 70_000, 4_000, 2),
        traces.launched("small", 90_000, 100_000, 4_000, 3),
        traces.launched("large", 101_000, 106_000, 94_000, 4),
    )
    rank = runs.rank_of(tmp_path, made)
    (row,) = rank.once(gaps.function).to_dict("records")
    assert (row["launching_ns"], row["overhead_ns"]) == (20_000 + 26_000, 2_000)
    assert (row["small_launching_ns"], row["small_overhead_ns"], row["small_kept_ns"]) == (26_000, 2_000, 2_000)
    (small,) = rank.once(small_kernels.function).to_dict("records")
    assert small == {"name": "small", "count": 2, "mean_ns": 4_000, "small": 2, "kernels": 4}


def test_what_the_host_waits_for_is_not_launching(tmp_path: Path) -> None:
    made = traces.trace(
        traces.step(0, 0, MS),
        traces.launched("first", 0, 10_000, 90_000, 1),
        traces.fetch(100_000, 500_000),
        traces.launched("second", 600_000, 610_000, 390_000, 2),
    )
    (row,) = runs.rank_of(tmp_path, made).once(gaps.function).to_dict("records")
    assert row["launching_ns"] + row["python_ns"] == 20_000  # before the first and the second kernel


def test_without_a_device_it_abstains(tmp_path: Path) -> None:
    rank = runs.rank_of(tmp_path, traces.trace(traces.op("aten::mm", 0, 10), device="", backend=""))
    with pytest.raises(NotMeasured):
        rank.once(gaps.function)
