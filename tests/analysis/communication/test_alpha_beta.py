"""The α–β model: known answers, fits that find what made the times, and their standard errors."""

from __future__ import annotations

import numpy as np
import pytest

from dlprof.analysis.communication.alpha_beta import MODELLED, AlphaBeta, fit, terms
from dlprof.errors import NotMeasured

SIZES = 4.0 ** np.arange(5, 15)
ALPHA, BETA = 5e-6, 1 / 20e9  # 5 µs, 20 GB/s


def model(collective: str, alpha: float = ALPHA, beta: float = BETA) -> AlphaBeta:
    return AlphaBeta(collective, alpha, beta, 0.0, 0.0, 0.0, (4,))


@pytest.mark.parametrize(
    ("collective", "seconds"),
    [  # of four ranks and 8 MB: all-reduce 6 messages of 2 MB, the halves of it 3, and one of 8 MB
        ("all_reduce", 6 * 5e-6 + 12e6 / 20e9),
        ("all_gather", 3 * 5e-6 + 6e6 / 20e9),
        ("reduce_scatter", 3 * 5e-6 + 6e6 / 20e9),
        ("all_to_all", 3 * 5e-6 + 6e6 / 20e9),
        ("send_recv", 5e-6 + 8e6 / 20e9),
    ],
)
def test_known_answers(collective: str, seconds: float) -> None:
    assert float(model(collective).predict(collective, 8e6, 4)) == pytest.approx(seconds)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    of = model("all_reduce")
    halves = of.predict("reduce_scatter", SIZES, 8) + of.predict("all_gather", SIZES, 8)
    assert of.predict("all_reduce", SIZES, 8) == pytest.approx(halves)


@pytest.mark.parametrize("collective", MODELLED)
def test_a_fit_finds_what_made_the_times(collective: str) -> None:
    found = fit(SIZES, 8, model(collective).predict(collective, SIZES, 8), collective)
    assert (found.alpha_s, found.beta_s_per_byte) == pytest.approx((ALPHA, BETA), rel=1e-6)
    assert found.off == pytest.approx(0.0, abs=1e-9)
    assert found.ranks == (8,)


def test_sizes_of_several_worlds_are_one_fit() -> None:
    ranks = np.repeat([2, 4, 16], len(SIZES))
    sizes = np.tile(SIZES, 3)
    found = fit(sizes, ranks, model("all_reduce").predict("all_reduce", sizes, ranks), "all_reduce")
    assert (found.alpha_s, found.beta_s_per_byte) == pytest.approx((ALPHA, BETA), rel=1e-6)
    assert found.ranks == (2, 4, 16)


def test_errors_are_standard_errors() -> None:
    rng = np.random.default_rng(7)
    true = model("all_reduce").predict("all_reduce", SIZES, 4)
    fits = [fit(SIZES, 4, true * (1 + 0.05 * rng.standard_normal(len(SIZES))), "all_reduce") for _ in range(400)]
    for name, error, value in (
        ("alpha_s", "alpha_error_s", ALPHA),
        ("beta_s_per_byte", "beta_error_s_per_byte", BETA),
    ):
        found = np.array([getattr(f, name) for f in fits])
        told = np.array([getattr(f, error) for f in fits])
        # Dividing by what was measured, not by what is true, gives a bias of the square of the noise.
        assert found.mean() == pytest.approx(value, rel=0.02)
        assert told.mean() == pytest.approx(found.std(), rel=0.15)


def test_small_messages_count_as_much_as_large_ones() -> None:
    took = model("send_recv").predict("send_recv", SIZES, 2)
    took[-1] *= 1.02  # of 13 ms, 50 times what all small ones take together
    assert fit(SIZES, 2, took, "send_recv").alpha_s == pytest.approx(ALPHA, rel=0.01)


def test_neither_is_negative() -> None:
    found = fit([1e6, 2e6, 4e6], 2, [1e-3, 2.5e-3, 6e-3], "send_recv")
    assert found.alpha_s == 0.0
    assert found.beta_s_per_byte > 0
    found = fit([1e3, 1e6], 2, [2e-3, 1e-3], "send_recv")
    assert (found.alpha_s > 0, found.beta_s_per_byte) == (True, 0.0)


def test_two_points_tell_no_error() -> None:
    found = fit([1e3, 1e6], 2, [1e-5, 1e-3], "send_recv")
    assert np.isnan(found.alpha_error_s)
    assert np.isnan(found.beta_error_s_per_byte)


@pytest.mark.parametrize(
    ("sizes", "ranks", "seconds"),
    [([1e6], 2, [1e-3]), ([1e6, 1e6], 2, [1e-3, 1.1e-3]), ([1e3, 1e6], 1, [1e-5, 1e-3]), ([1e3, 1e6], 2, [0.0, 1e-3])],
)
def test_points_that_do_not_tell_one_from_the_other(sizes: list[float], ranks: int, seconds: list[float]) -> None:
    with pytest.raises(NotMeasured, match="fewer than two sizes"):
        fit(sizes, ranks, seconds, "all_reduce")


def test_a_collective_without_a_model() -> None:
    with pytest.raises(ValueError, match="no model of broadcast"):
        terms("broadcast", 1e6, 4)
