"""Samples become medians of the longest of all ranks, and times α and β."""

from __future__ import annotations

import pytest

from dlprof.trial.bandwidth.plan import Plan
from dlprof.trial.bandwidth.results import OUT_OF_TIME, PairRow, Raw, Row, summed

PLAN = Plan((1_000,), iterations=3)


def raw(*rows: Row, pairs: tuple[PairRow, ...] = ()) -> Raw:
    return Raw(rows, pairs, ("a", "a", "b"), "", "gloo", 1, 2.5, {"torch": "2.13"})


def row(size: int, *samples: tuple[float, ...], correct: bool = True) -> Row:
    return Row("send_recv", size, size // 4, 1, samples, correct)


def test_of_each_sample_the_longest_of_all_ranks_counts() -> None:
    of = summed(raw(row(1_000, (1e-3, 5e-3, 2e-3), (2e-3, 1e-3, 2e-3), (1e-3, 1e-3, 4e-3))), PLAN)
    (timing,) = of.timings
    assert timing.ns == pytest.approx(4e6)  # of 2, 5 and 4 ms
    assert timing.low_ns == pytest.approx(2.4e6)
    assert timing.high_ns == pytest.approx(4.8e6)
    assert (timing.samples, timing.correct, of.state, of.ranks) == (3, True, "complete", 3)


def test_times_are_fitted() -> None:
    rows = [row(size, (1e-5 + size / 1e9,)) for size in (1_000, 100_000, 10_000_000)]
    (fit,) = summed(raw(*rows), PLAN).fits
    assert (fit.alpha_s, fit.beta_s_per_byte) == pytest.approx((1e-5, 1e-9))
    assert fit.alpha_error_s == pytest.approx(0.0, abs=1e-9)


def test_what_has_no_time_says_why_and_what_is_wrong_is_warned_of() -> None:
    of = summed(raw(row(8, (1e-3,), correct=False), Row("all_to_all", 8, why=OUT_OF_TIME)), PLAN)
    assert [(t.ns is None, t.why) for t in of.timings] == [(False, ""), (True, OUT_OF_TIME)]
    assert of.state == "out_of_time"
    assert of.warnings == ("send_recv of 8 bytes gave a wrong result",)
    assert of.fits == ()


def test_of_a_pair_the_slower_counts() -> None:
    of = summed(raw(pairs=(PairRow((0, 2), 8, ((1e-3, 3e-3, 1e-3), (2e-3, 1e-3, 2e-3))),)), PLAN)
    assert of.pairs[0].ns == pytest.approx(2e6)
