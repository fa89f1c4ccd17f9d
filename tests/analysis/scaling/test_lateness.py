"""How late the latest of n ranks is, against what is known of distributions."""

from __future__ import annotations

import numpy as np
import pytest

from dlprof.analysis.scaling.predictions import Lateness, uncertainty


def quantiles(values: np.ndarray) -> tuple[float, ...]:
    return tuple(float(piece.mean()) for piece in np.array_split(np.sort(values), min(64, len(values))))


def mean_of_latest(late: tuple[float, ...], ranks: int, *, tail: bool = True) -> float:
    """Of single steps, where ranks are alike for good."""
    return Lateness((), late).mean_of_latest(ranks, tail=tail)


@pytest.mark.parametrize("ranks", [2, 8, 64, 1024])
def test_exponential_lateness_grows_as_the_harmonic_numbers(ranks: int) -> None:
    late = quantiles(np.random.default_rng(1).exponential(1.0, 20_000))
    harmonic = sum(1 / k for k in range(1, ranks + 1))
    assert mean_of_latest(late, ranks) == pytest.approx(harmonic - 1, rel=0.1)


@pytest.mark.parametrize(("ranks", "known"), [(2, 0.5642), (4, 1.0294), (8, 1.4236), (64, 2.3437)])
def test_normal_lateness(ranks: int, known: float) -> None:
    # Harter: Expected Values of Normal Order Statistics, Biometrika 48, 1961.
    late = quantiles(np.random.default_rng(2).normal(0.0, 1.0, 20_000))
    assert mean_of_latest(late, ranks) == pytest.approx(known, rel=0.1)


def test_uniform_lateness_is_bounded_without_a_tail() -> None:
    late = quantiles(np.random.default_rng(3).uniform(0.0, 1.0, 20_000))
    assert mean_of_latest(late, 1000, tail=False) == pytest.approx(0.5, rel=0.05)
    assert mean_of_latest(late, 3) == pytest.approx(3 / 4 - 1 / 2, rel=0.05)


def test_one_slow_kind_of_ranks_saturates() -> None:
    late = quantiles(np.array([0.0] * 750 + [100.0] * 250))
    assert mean_of_latest(late, 64) == pytest.approx(75.0, rel=0.02)
    assert mean_of_latest(late, 4096) == pytest.approx(75.0, rel=0.02)


def test_a_few_uneven_ranks_are_taken_to_be_normally_distributed() -> None:
    uneven = quantiles(np.random.default_rng(5).normal(0.0, 1.0, 16))
    made = Lateness(uneven, ())
    assert made.mean_of_latest(64) == pytest.approx(2.3437 * made.spread_ns, rel=0.03)
    assert made.mean_of_latest(64, tail=False) == pytest.approx(max(uneven) - np.mean(uneven), rel=0.1)
    assert uncertainty(9) == pytest.approx(0.25)


def test_many_ranks_show_their_distribution() -> None:
    made = Lateness(quantiles(np.random.default_rng(6).uniform(0.0, 1.0, 1024)), ())
    assert made.mean_of_latest(4096) == pytest.approx(0.5, rel=0.03)


def test_both_kinds_add_up() -> None:
    # The sum of two normal draws of 3 and 4 is one of 5.
    three = quantiles(np.random.default_rng(7).normal(0.0, 3.0, 20_000))
    four = quantiles(np.random.default_rng(8).normal(0.0, 4.0, 20_000))
    assert Lateness(three, four).mean_of_latest(8) == pytest.approx(5 * 1.4236, rel=0.05)


def test_nothing_known_is_nothing_late() -> None:
    assert Lateness((), ()).mean_of_latest(8) == 0.0
    assert Lateness((), (1.0, 2.0)).mean_of_latest(1) == 0.0
