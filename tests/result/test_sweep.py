"""A sweep is written and read back as it is; its points know their rate, and how far their readings are apart."""

from __future__ import annotations

import pytest

from dlprof.errors import DlprofError
from dlprof.result.sweep import Axis, Point, Reading, Sweep, from_json, to_json

POINT = Point({"n": "2"}, (Reading(1e8, 32.0), Reading(1.1e8, 32.0)), predicted_ns=1e8)
SWEEP = Sweep(("python", "train.py"), (Axis("n", ("2", "4")),), (POINT, Point({"n": "4"}, why="it died")), 2, 30)


def test_a_sweep_is_read_back() -> None:
    assert from_json(to_json(SWEEP)) == SWEEP


@pytest.mark.parametrize("data", [None, [], {"format": 2}, {"format": 1}, {**to_json(SWEEP), "points": 3}])
def test_what_is_no_sweep_is_refused(data: object) -> None:
    with pytest.raises(DlprofError, match=r"sweep\.json"):
        from_json(data)


def test_rates_and_spread_of_a_point() -> None:
    assert POINT.rate(samples=True) == pytest.approx((320 + 32 / 0.11) / 2)
    assert POINT.rate(samples=False) == pytest.approx((10 + 1 / 0.11) / 2)
    assert POINT.spread == pytest.approx(0.0673, rel=1e-2)
    assert Point({}, (Reading(1e8),)).spread is None
    assert (Point({}).rate(samples=True), Point({}).step_ns) == (None, None)


def test_samples_count_where_all_readings_have_them() -> None:
    assert SWEEP.by_samples
    unknown = Point({"n": "4"}, (Reading(1e8),))
    assert not Sweep((), (), (POINT, unknown), 1, 30).by_samples
    assert not Sweep((), (), (), 1, 30).by_samples
