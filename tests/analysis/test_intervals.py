"""Sets of time against sets of integers: every function agrees with counting the units one by one."""

from itertools import pairwise

import numpy as np
import pytest

from dlprof.analysis import intervals
from dlprof.analysis.intervals import EMPTY, Intervals

HORIZON = 60


def units(a: Intervals) -> set[int]:
    return {unit for start, end in a for unit in range(start, end)}


def assert_is_set(a: Intervals) -> None:
    assert a.dtype == np.int64
    assert a.shape == (len(a), 2)
    assert (a[:, 1] > a[:, 0]).all()
    assert (a[1:, 0] > a[:-1, 1]).all(), "sorted, disjoint, and touching ones merged"


def raw(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(0, 12))
    start = rng.integers(0, HORIZON - 10, count)
    return start, start + rng.integers(-2, 10, count)


def some(seed: int) -> Intervals:
    return intervals.union(*raw(seed))


@pytest.mark.parametrize("seed", range(20))
def test_every_function_agrees_with_counting_units(seed: int) -> None:
    start, end = raw(seed)
    counted = {unit for a, b in zip(start, end, strict=True) for unit in range(a, b)}
    a, b = some(seed), some(seed + 1000)
    assert units(a) == counted
    assert intervals.total(a) == len(counted)
    for made, expected in (
        (a, counted),
        (intervals.intersect(a, b), units(a) & units(b)),
        (intervals.subtract(a, b), units(a) - units(b)),
        (intervals.merge(a, b), units(a) | units(b)),
        (intervals.clip(a, 10, 30), units(a) & set(range(10, 30))),
    ):
        assert units(made) == expected
        assert_is_set(made)
    edges = np.array([0, 7, 7, 20, 41, HORIZON])
    slots = [len(units(a) & set(range(x, y))) for x, y in pairwise(edges)]
    assert intervals.per_slot(a, edges).tolist() == slots


def test_functions_leave_their_arguments_alone() -> None:
    a, b = some(1), some(2)
    before = a.copy(), b.copy()
    intervals.intersect(a, b), intervals.subtract(a, b), intervals.merge(a, b), intervals.clip(a, 3, 9)
    assert (a == before[0]).all()
    assert (b == before[1]).all()


def test_nothing_stays_nothing() -> None:
    a = some(1)
    for made in (
        intervals.union(np.array([5, 9]), np.array([5, 3])),
        intervals.intersect(a, EMPTY),
        intervals.subtract(EMPTY, a),
        intervals.clip(a, 9, 9),
        intervals.clip(a, 9, 3),
        intervals.merge(),
        intervals.merge(EMPTY, EMPTY),
    ):
        assert made.shape == (0, 2)
        assert intervals.total(made) == 0
    assert (intervals.subtract(a, EMPTY) == a).all()
    assert intervals.per_slot(EMPTY, np.array([0, 5, 9])).tolist() == [0, 0]


def test_which_instants_lie_in_a_set() -> None:
    a = np.array([[0, 10], [20, 30]], dtype=np.int64)
    assert intervals.holds(a, np.array([0, 9, 10, 25, 30])).tolist() == [True, True, False, True, False]
    assert intervals.holds(EMPTY, np.array([1])).tolist() == [False]


def test_times_of_today_keep_their_nanoseconds() -> None:
    now = 1_735_632_360_123_456_789
    a = intervals.union(np.array([now, now + 5]), np.array([now + 3, now + 9]))
    assert intervals.total(a) == 7
    assert intervals.intersect(a, intervals.union(np.array([now + 2]), np.array([now + 6]))).tolist() == [
        [now + 2, now + 3],
        [now + 5, now + 6],
    ]
