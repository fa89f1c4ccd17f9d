"""Figures are written with the unit and the digits that people read."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest

from dlprof import units


@pytest.mark.parametrize(
    ("ns", "written"),
    [
        (0, "0 ns"),
        (640, "640 ns"),
        (18_340, "18.3 µs"),
        (999.6, "1.00 µs"),
        (999_960, "1.00 ms"),
        (214_600_000, "214.6 ms"),
        (999_940_000, "999.9 ms"),
        (999_960_000, "1.00 s"),
        (7.2e12, "7,200 s"),
        (-66e6, "−66.0 ms"),
        (math.nan, "—"),
        (-math.inf, "—"),
    ],
)
def test_a_duration_takes_the_unit_that_suits_it(ns: float, written: str) -> None:
    assert units.duration(ns) == written


@pytest.mark.parametrize(
    ("n", "written"), [(0, "0 B"), (12, "12 B"), (2_312e6, "2.31 GB"), (77.1e6, "77.1 MB"), (5e15, "5,000 TB")]
)
def test_a_size_is_decimal(n: float, written: str) -> None:
    assert units.size(n) == written


@pytest.mark.parametrize(
    ("share", "written"),
    [
        (0, "0 %"),
        (0.0001, "< 0.1 %"),
        (0.0449, "4.5 %"),
        (0.0994, "9.9 %"),
        (0.0996, "10 %"),
        (0.46, "46 %"),
        (1.5, "150 %"),
        (-0.2, "−20 %"),
        (math.nan, "—"),
    ],
)
def test_percent_keeps_a_digit_of_small_shares(share: float, written: str) -> None:
    assert units.percent(share) == written


@pytest.mark.parametrize(
    ("value", "unit", "written"),
    [
        (0.25, "share", "25 %"),
        (4.2e6, "ns", "4.20 ms"),
        (1_234_567, "", "1,234,567"),
        (0.00012, "s", "0.00012 s"),
        (1234.5, "MHz", "1,234 MHz"),
        (591_872, "FLOP", "591.9 kFLOP"),
        (1.56e15, "FLOP", "1.56 PFLOP"),
        (math.inf, "bytes", "—"),
    ],
)
def test_a_quantity_of_any_unit(value: float, unit: str, written: str) -> None:
    assert units.quantity(value, unit) == written


def test_an_axis_has_one_scale_that_suits_its_largest_value() -> None:
    assert units.scale("ns", 4e6) == (1e6, "ms")
    assert units.scale("ns", 0) == (1.0, "ns")
    assert units.scale("bytes", 12) == (1.0, "B")
    assert units.scale("share", 0.3) == (0.01, "%")
    assert units.scale("watts", 300) == (1.0, "watts")


@pytest.mark.parametrize(
    ("n", "noun", "written"),
    [
        (1, "copy", "1 copy"),
        (3, "copy", "3 copies"),
        (2.5, "batch", "2.5 batches"),
        (0, "rank", "0 ranks"),
        (12_000, "kernel", "12,000 kernels"),
        (61.4, "kernel", "61 kernels"),
    ],
)
def test_count(n: float, noun: str, written: str) -> None:
    assert units.count(n, noun) == written


def test_names_that_are_cut_say_so() -> None:
    assert units.short("x" * 12, 12) == "x" * 12
    assert units.short("x" * 13, 12) == "x" * 11 + "…"


def test_a_list_that_is_cut_says_so() -> None:
    assert units.few([1, 2, 3], 3) == "1, 2, 3"
    assert units.few(["a", "b", "c"], 2) == "a, b …"


def test_how_often_and_which_of_many_as_one_says_it() -> None:
    assert [units.often(n) for n in (1, 2.0, 10, 2.5)] == ["once", "twice", "10 times", "2.50 times"]
    assert [units.every(n, "step") for n in (1.0, 2.0, 3.0, 11, 21, 4.92, 1.3)] == [
        "every step",
        "every 2nd step",
        "every 3rd step",
        "every 11th step",
        "every 21st step",
        "every 5th step",
        "about every step",
    ]


def test_a_number_to_type_is_round_and_not_below() -> None:
    assert [units.typed(n) for n in (0.3, 7, 9.2, 10, 10.5, 101, 131, 138, 2000, 9001)] == [
        1,
        7,
        10,
        10,
        12,
        120,
        150,
        150,
        2000,
        10000,
    ]
    assert all(n <= units.typed(n) <= 1.34 * n for n in range(10, 5000))


def test_what_a_setting_is_now_is_said_where_it_is_known() -> None:
    assert (units.is_now(None), units.is_now(0), units.is_now(False)) == ("", " (is 0)", " (is False)")


@pytest.mark.parametrize(
    ("ranks", "text", "subject"),
    [
        ([3], "3", "rank 3"),
        ([5, 3], "3, 5", "ranks 3 and 5"),
        ([0, 1, 2, 4], "0 to 2, 4", "ranks 0 to 2 and 4"),
        (range(8), "0 to 7", "ranks 0 to 7"),
    ],
)
def test_ranks_in_words(ranks: Iterable[int], text: str, subject: str) -> None:
    assert (units.listed(ranks), units.ranks_named(ranks)) == (text, subject)


def test_many_ranks_are_counted() -> None:
    assert units.listed(range(0, 100, 2)).endswith("(50 ranks)")
