"""The oracles' arithmetic, on figures whose answer is known."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import pytest

from benchmarks.gpu import timing

MS = 1_000_000


def test_the_steady_step_is_that_of_the_events_whatever_one_pause_took() -> None:
    # Three short steps while the queue fills, then 40 ms each, 38 of them busy, and once the host stood still.
    periods = [10.0, 10.0, 10.0, *[40.0] * 20, 900.0, *[40.0] * 20]
    began = [0.0, *accumulate(periods)]
    busy = [5.0, 5.0, 5.0, *[38.0] * 42]
    found = timing.steady(began, busy[: len(began)], skip=3)
    assert (found.step_ms, found.busy_ms) == (40.0, 38.0)
    assert found.busy_share == pytest.approx(0.95)
    assert found.steps == 41


def test_steps_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="3 steps began and 2 worked"):
        timing.steady([0.0, 1.0, 2.0], [1.0, 1.0], 0)
    with pytest.raises(ValueError, match="no steady step"):
        timing.steady([0.0, 1.0, 2.0], [1.0, 1.0, 1.0], 2)
    with pytest.raises(ValueError, match="no steady step"):
        timing.steady([0.0, 0.0, 2.0], [1.0, 1.0, 1.0], 0)


def test_the_mean_period_of_the_traced_steps() -> None:
    began = [0.0, 10.0, 20.0, 50.0, 60.0]
    assert timing.mean_period_ms(began, 1, 2) == 20.0
    assert timing.mean_period_ms(began, 3, 3) == 10.0
    # The last step has no end on the device's timeline.
    assert math.isnan(timing.mean_period_ms(began, 3, 4))


def test_a_step_from_a_jobs_own_lines() -> None:
    lines = [(0.0, "12 layers"), (1.0, "step 10  loss 2"), (1.5, "step 20  loss 2"), (1.6, "step 20 again is no step")]
    lines += [(2.0, "step 30  loss 1"), (4.5, "step 40  loss 1"), (5.0, "step 50  loss 1"), (5.1, "saved step 50")]
    assert timing.step_times(lines)[-1] == (50, 5.0)
    # 50, 250 (an epoch's end) and 50 ms: the median, from step 20 on.
    assert timing.step_ms_of_lines(lines, 20) == pytest.approx(50.0)
    assert math.isnan(timing.step_ms_of_lines(lines, 50))


def test_a_step_as_a_script_says_it_itself() -> None:
    assert (
        timing.step_ms_said([(0.0, "STEP_MS 1.5"), (0.0, "loss 2"), (0.0, "STEP_MS 12.250"), (0.0, "STEP_MS x")])
        == 12.25
    )
    assert timing.step_ms_said([(0.0, "a STEP_MS 1.5")]) is None


def test_ratios_are_of_pairs_made_one_after_the_other() -> None:
    # A machine that becomes slower meanwhile counts against neither.
    assert list(timing.ratio([(10.1, 10.0), (20.2, 20.0), (33.0, 30.0)])) == pytest.approx([1.01, 1.01, 1.1])
    assert all(math.isnan(x) for x in timing.ratio([]))


def test_lateness_is_against_the_first_of_the_others() -> None:
    arrived = {0: [0, 100 * MS, 200 * MS], 1: [900 * MS, 121 * MS, 219 * MS], 2: [0, 110 * MS, 205 * MS]}
    assert timing.lateness_ms(arrived, late=1, skip=1) == pytest.approx(20.0)
    assert math.isnan(timing.lateness_ms(arrived, late=1, skip=3))
    assert math.isnan(timing.lateness_ms({1: [1, 2]}, late=1, skip=0))


def test_samples_within_the_time() -> None:
    rows: list[dict[str, Any]] = [{"at_ns": n * 1000 * MS, "power_w": 100.0 + n} for n in range(5)]
    rows[1]["power_w"] = None
    assert timing.inside(rows, "power_w", "at_ns", 0, 3e9) == [100.0, 102.0, 103.0]
    assert timing.inside(rows, "no such", "at_ns", 0, 3e9) == []
    assert timing.middle([]) is None
