"""A run measures enough steps and seconds, and whole epochs where they are short."""

from __future__ import annotations

import pytest

from dlprof.trial.search import FEWEST_STEPS, LEAST_STEPS, MOST_STEPS, WINDOW_S, steps_of_window

MS = 1e6


@pytest.mark.parametrize(
    ("step_ns", "epoch", "minutes", "steps"),
    [
        (None, None, 10, LEAST_STEPS),
        (0.0, None, 10, LEAST_STEPS),
        (20 * MS, None, 10, 400),
        (0.1 * MS, None, 10, MOST_STEPS),
        (500 * MS, None, 10, LEAST_STEPS),
        (5_000 * MS, None, 10, FEWEST_STEPS),  # 37 s hold no more than seven of them
        (20 * MS, 200, 10, 640),
        (20 * MS, 60, 10, 400),
        (20 * MS, 5_000, 10, 400),  # such an epoch does not fit
    ],
)
def test_steps(step_ns: float | None, epoch: int | None, minutes: float, steps: int) -> None:
    assert steps_of_window(step_ns, epoch, 60 * minutes) == steps


def test_a_window_lasts_its_seconds_where_steps_allow_it() -> None:
    assert steps_of_window(40 * MS, None, 600) * 40 * MS == WINDOW_S * 1e9
