"""What a larger batch needs, counted by part and read from the allocator, and which sizes are named."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from dlprof.analysis.memory.changes import batch_need, batch_room, even, gain_at, most_times
from tests.fixtures import allocator, holding, runs
from tests.fixtures.holding import row

ROWS = [row("parameter", "a", 10_000), row("optimizer", "a", 20_000), row("gradient", "a", 10_000)]
ROWS += [row("activation", "a", 25_000), row("input", "", 1_000, "")]


def room(path: Path) -> pd.DataFrame:
    return runs.measured(path, batch_room).frame(batch_room)


def test_what_was_counted_grows_by_part(tmp_path: Path) -> None:
    path = holding.recorded(tmp_path, ROWS)
    # At the peak 4,000 more than was counted; a cache of 3,000, which a larger batch would use.
    read = {"peak_allocated_bytes": 60_000, "reserved_bytes": 63_000, "peak_reserved_bytes": 63_000}
    allocator.write(path, [allocator.reading(5, 40_000, **read)])
    (found,) = room(path).to_dict("records")
    assert (found["stays_bytes"], found["grows_bytes"]) == (30_000, 30_000)
    assert (found["floor_bytes"], found["total_bytes"], found["counted"]) == (41_000, 100_000, 1)
    # 62,000 are free below 92 %.
    assert most_times(room(path)) == pytest.approx(62_000 / 30_000)
    assert batch_need(room(path), 2) == pytest.approx(0.9)
    assert batch_need(room(path), 0.1) == pytest.approx(0.41)  # as the optimizer steps


def test_without_a_count_all_grows_that_a_step_does_not_leave(tmp_path: Path) -> None:
    path = allocator.recorded(tmp_path, [allocator.reading(n, 10 * allocator.GB) for n in range(9)])
    (found,) = room(path).to_dict("records")
    assert (found["stays_bytes"], found["grows_bytes"]) == (10 * allocator.GB, allocator.GB // 2)
    assert found["counted"] == 0


@pytest.mark.parametrize(
    ("times", "batch", "size"), [(2.9, 32, 88), (2.9, 5, 14), (1.1, 8, 8), (3.3, 4, 13), (1.2, 100, 120), (64, 2, 128)]
)
def test_a_size_is_a_whole_number_and_of_sixteen_on_a_multiple_of_eight(times: float, batch: int, size: int) -> None:
    assert even(times, batch) * batch == pytest.approx(size)


def test_a_batch_that_nobody_knows_is_told_in_quarters() -> None:
    assert even(2.9, None) == 2.75


def test_a_gain_between_two_multiples_is_no_more_than_the_straight_line() -> None:
    known = pd.DataFrame({"times": [1.0, 2.0, 4.0], "gain_ns": [0.0, 40.0, 60.0], "again_ns": [-30.0, 20.0, 40.0]})
    assert gain_at(known, 2) == 40
    assert gain_at(known, 8 / 3) == pytest.approx(50)  # half way between a half and a quarter
    assert gain_at(known, 100) == 60
    assert gain_at(known, 1, "again_ns") == -30
