"""When a difference of two runs is more than noise."""

from __future__ import annotations

import pytest

from dlprof.analysis.compare.comparison import compare
from dlprof.analysis.compare.significance import Difference
from tests.fixtures.comparisons import run, step_of
from tests.fixtures.results import MS


@pytest.mark.parametrize(
    ("b", "noise", "verdict"),
    [
        (80.0, 0.5, "faster"),
        (120.0, 0.5, "slower"),
        (100.9, 0.1, "noise"),  # beyond the standard error, and below what two recordings differ by anyway
        (103.0, 2.0, "noise"),  # √8 × 2 = 5.7
        (110.0, 2.0, "slower"),
        (120.0, None, "unknown"),
    ],
)
def test_a_difference_counts_beyond_its_noise(b: float, noise: float | None, verdict: str) -> None:
    step = step_of(compare(run(100, noise=noise), run(b, noise=noise)))
    assert step.verdict == verdict
    assert step.ns == pytest.approx((b - 100) * MS)
    if noise is not None:
        assert step.noise_ns == pytest.approx(2**0.5 * noise * MS)


def test_what_one_run_does_not_know_is_unknown_and_a_small_difference_is_noise() -> None:
    assert Difference("copy", None, 3.0, 0.1).verdict == "unknown"
    assert Difference("copy", 1.0, 3.0).verdict == "unknown"  # how much it varies is not known
    assert Difference("copy", 100.0, 98.0, 0.1, least_ns=5.0).verdict == "noise"
    assert Difference("copy", 3.0, 3.0, 0.0).verdict == "noise"
    assert Difference("copy", 3.0, 1.0, 0.9).ns == -2.0
