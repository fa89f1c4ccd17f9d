"""What a report says of a device's own time, and where it says nothing."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from dlprof.plain import NBSP
from dlprof.report import logged, verdict
from dlprof.result import Result, Window
from dlprof.result.figures import DeviceWork, WorkKind
from tests.fixtures import results

MS = 1_000_000

CONVOLUTION = WorkKind("convolution", 216, 10 * MS, 4.0 * MS, flops=3.11e12, bytes=13e9)
NORM = WorkKind("normalization", 212, 31 * MS, 3.0 * MS, bytes=14e9)
LAYOUT = WorkKind("layout and type changes", 339, 7 * MS, 0.0)
WORK = DeviceWork((NORM, CONVOLUTION, LAYOUT), 7.0 * MS, 0.0, 6.0 * MS)


def said(work: DeviceWork | None, step_ms: float = 50, **window: Any) -> tuple[str, str]:
    result = replace(results.healthy(), device_work=work, window=Window(20, "steps", step_ms * MS, **window))
    first, second = logged.sentences(result)
    return first.replace(NBSP, " "), second.replace(NBSP, " ")


def test_the_floor_of_a_step_and_what_is_farthest_above_it() -> None:
    first, second = said(WORK)
    assert "at least 7.00 ms on this GPU, or 6.00 ms with chains" in first
    assert "its kernels take 48.0 ms" in first
    assert "Of the 41.0 ms above that bound, they spend 28.0 ms in normalization and 7.00 ms in layout" in first
    # 2 of the 50 ms are not kernels.
    assert "at most 5.56 × faster" in second


def test_what_shares_a_floor_is_above_it_at_the_least() -> None:
    shared = replace(NORM, floor_ns=0.0, shared_ns=31.0 * MS)
    first, _ = said(DeviceWork((shared, CONVOLUTION), 12.0 * MS, shared_floor_ns=8.0 * MS), step_ms=41)
    assert "they spend at least 23.0 ms in normalization and 6.00 ms in convolution" in first
    assert "fused" not in first


def test_a_step_near_its_floor_is_told_so_and_no_kind_is_blamed() -> None:
    near = DeviceWork((replace(NORM, floor_ns=29.5 * MS), replace(CONVOLUTION, floor_ns=9.5 * MS)), 39.0 * MS)
    first, second = said(near, step_ms=41.5)
    assert first.endswith("its kernels take 41.0 ms.")
    assert "at most 1.05 × faster" in second


@pytest.mark.parametrize(
    ("work", "window"),
    [
        (None, {}),
        (replace(WORK, floor_ns=None, why="the limits are not known"), {}),
        (WORK, {"step_ms": 70}),  # the host limits it
        (WORK, {"step_ms": 40}),  # kernels run beside each other
        (WORK, {"unit": "trace"}),
    ],
)
def test_where_the_device_is_not_the_limit_or_has_no_floor_nothing_is_told(work: DeviceWork, window: Any) -> None:
    assert said(work, **window) == ("", "")


def test_a_bound_that_is_far_away_is_not_told() -> None:
    assert said(replace(WORK, floor_ns=1.0 * MS), step_ms=48)[1] == ""


def test_the_verdict_of_a_healthy_run_ends_with_the_bound() -> None:
    healthy = replace(results.healthy(), device_work=WORK, window=Window(20, "steps", 50 * MS))
    assert verdict.headline(healthy).gain.endswith(logged.sentences(healthy)[1])
    assert verdict.headline(replace(healthy, device_work=None)).gain.endswith(".")


def rows(result: Result) -> list[tuple[str, ...]]:
    figure = logged.table(result)
    assert figure is not None
    return [tuple(cell.replace(NBSP, " ") for cell in row) for row in figure.table.rows]


def test_the_table_has_the_rates_and_the_floor_of_each_kind() -> None:
    norm, convolution, layout = rows(replace(results.healthy(), device_work=WORK))
    assert convolution == ("convolution", "216", "10.0 ms", "21 %", "311", "1.30 TB", "4.00 ms", "6.00 ms")
    assert norm[4:] == ("—", "451.6 GB", "3.00 ms", "28.0 ms")
    assert layout[4:] == ("—", "—", "0 ns", "7.00 ms")
    assert logged.table(results.healthy()) is None


def test_the_table_says_why_there_is_no_floor_and_what_is_shared() -> None:
    without = DeviceWork((replace(NORM, floor_ns=None),), why="the limits of Else are not known")
    figure = logged.table(replace(results.healthy(), device_work=without))
    assert figure is not None
    assert "the limits of Else are not known" in figure.note
    shared = DeviceWork((replace(NORM, shared_ns=31.0 * MS),), 8.0 * MS, shared_floor_ns=8.0 * MS)
    figure = logged.table(replace(results.healthy(), device_work=shared))
    assert figure is not None
    assert "8.00" in figure.note
    assert "needs at least" not in figure.table.columns
