"""Figures carry units that suit them, and text from anywhere is safe to show."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from dlprof.plain import NBSP, plain
from dlprof.report import formatting, verdict
from dlprof.result import Together
from tests.fixtures import results
from tests.fixtures.results import MS


@pytest.mark.parametrize(
    ("ns", "written"),
    [
        (0, "0 ns"),
        (640, "640 ns"),
        (18_340, "18.3 µs"),
        (999_960, "1.00 ms"),
        (214.6e6, "214.6 ms"),
        (999.96e6, "1.00 s"),
        (-66e6, "−66.0 ms"),
        (7.2e12, "7,200 s"),
        (math.nan, "—"),
    ],
)
def test_duration_takes_the_unit_that_suits_it(ns: float, written: str) -> None:
    assert formatting.duration(ns).replace(NBSP, " ") == written


@pytest.mark.parametrize(
    ("share", "written"),
    [(0, "0 %"), (0.0001, "< 0.1 %"), (0.012, "1.2 %"), (0.314, "31 %"), (1, "100 %"), (math.inf, "—")],
)
def test_percent_keeps_a_digit_of_small_shares(share: float, written: str) -> None:
    assert formatting.percent(share).replace(NBSP, " ") == written


@pytest.mark.parametrize(
    ("value", "unit", "written"),
    [
        (1.2e9, "bytes", "1.20 GB"),
        (12, "bytes", "12 B"),
        (0.5, "share", "50 %"),
        (1980.0, "MHz", "1,980 MHz"),
        (3, "", "3"),
    ],
)
def test_quantity_writes_known_units_in_multiples(value: float, unit: str, written: str) -> None:
    assert formatting.quantity(value, unit).replace(NBSP, " ") == written


def test_ranks_join_runs() -> None:
    assert formatting.ranks([3]) == "rank 3"
    assert formatting.ranks([7, 0, 1, 2, 3]) == "ranks 0–3, 7"
    assert formatting.ranks([4, 5]) == "ranks 4, 5"
    assert formatting.ranks([]) == ""


def test_plain_escapes_what_acts_and_keeps_what_is_written() -> None:
    assert plain("a\x1b[31m\x00\u202eb\ud800\n") == "a\\x1b[31m\\x00\\u202eb\\ud800\\x0a"
    assert plain("naïve – שלום 漢字 \u00a0") == "naïve – שלום 漢字 \u00a0"
    assert plain("a\nb", keep="\n") == "a\nb"
    assert plain("abcdef", 4) == "abc…"


def test_a_speed_up_has_its_margin_and_says_whether_it_is_a_bound() -> None:
    found = results.healthy().outcomes[0]
    found = replace(found, state="found", saving_ns=20 * MS, share=0.2, speedup=1.25, error_ns=2 * MS)
    # The step after is 80 ± 2 ms: 2.5 % of the speed-up.
    assert formatting.gained(found).replace(NBSP, " ") == "1.25 × faster (± 0.03)"
    assert formatting.margin(found).replace(NBSP, " ") == "± 0.03"
    assert formatting.speedup(found).replace(NBSP, " ") == "1.25 ×"
    most = replace(found, at_most=True)
    assert formatting.gained(most).replace(NBSP, " ") == "at most 1.25 × faster"
    assert formatting.speedup(most).replace(NBSP, " ") == "≤ 1.25 ×"
    assert formatting.margin(most) == ""
    # What is known to a thousandth is not known exactly.
    assert formatting.margin(replace(found, error_ns=100.0)).replace(NBSP, " ") == "± 0.01"
    for error in (math.nan, math.inf, -1.0):
        assert formatting.margin(replace(found, error_ns=error)) == ""


def test_findings_together_are_bounded_where_there_are_several() -> None:
    said = formatting.together(results.ddp()).replace(NBSP, " ")
    assert said == "All of these together: at most 1.79 × faster (−94.8 ms)."
    assert formatting.together(results.many()) == ""
    # No job becomes eighteen times as fast by what dlprof advises.
    absurd = Together(204 * MS, 0.95, 18.1)
    assert formatting.together(replace(results.ddp(), together=absurd)) == ""
    assert formatting.together(results.healthy()) == ""
    assert formatting.together(results.hostile()) == ""


def test_how_far_traced_steps_stand_for_the_job() -> None:
    result = results.ddp()
    window = result.window
    assert window is not None
    assert formatting.limits(result).replace(NBSP, " ") == "5 traced steps took 1.04 × as long as the others"
    assert formatting.limits(replace(result, window=replace(window, overhead=None))) == ""
    traced = replace(result, window=replace(window, overhead=None, source="trace"))
    assert formatting.limits(traced).startswith("every step was traced")
    said = verdict.headline(traced)[1].replace(NBSP, " ")
    assert said == "Fixing it at train.py:61 would make the traced steps 1.44 × faster."
    one = replace(result, window=replace(window, overhead=None, source="trace", steps=1))
    assert formatting.limits(one).startswith("the only step was traced")
    whole = replace(result, window=replace(window, overhead=None, source="trace", unit="trace"))
    assert formatting.limits(whole) == formatting.limits(replace(result, window=None)) == ""


def test_outliers_are_the_ranks_unlike_the_mean_and_alike_ranks_have_none() -> None:
    assert formatting.outliers(results.many(64).time, 4) == [37]
    assert formatting.outliers(results.healthy().time, 4) == []


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("torchrun", "--nproc-per-node=4", "jobs/train.py", "x.py"), "train.py"),
        (("python", "-m", "pkg.train", "--lr", "1"), "pkg.train"),
        (("./launch.sh",), "launch.sh"),
        ((), "dead"),
    ],
)
def test_name_is_that_of_the_script(command: tuple[str, ...], name: str) -> None:
    from msgspec.structs import replace

    result = results.empty()
    assert formatting.name(replace(result, run=replace(result.run, command=command))) == name


def test_a_factor_from_ten_on_tells_no_more() -> None:
    assert [formatting.times(x) for x in (1.4449, 9.94, 10, 11.94, 3.5e6, math.inf)] == [
        "1.44\xa0×",
        "9.94\xa0×",
        "10.00\xa0×",
        "over 10\xa0×",
        "over 10\xa0×",
        "—",
    ]


@pytest.mark.parametrize(
    ("kernel", "short"),
    [
        ("void at::native::(anonymous namespace)::softmax<4, at::Half>(int)", "softmax<4, at::Half>(int)"),
        ("sm90_xmma_gemm_bf16", "sm90_xmma_gemm_bf16"),
        ("ncclDevKernel_AllReduce(ncclDevKernelArgs)", "ncclDevKernel_AllReduce(ncclDevKernelArgs)"),
    ],
)
def test_a_kernel_without_its_namespaces(kernel: str, short: str) -> None:
    assert formatting.unqualified(kernel) == short


def test_a_saving_that_is_a_bound_is_written_as_one() -> None:
    first = results.ddp().found[0]
    assert formatting.speedup(first) == f"1.44{NBSP}×"
    assert formatting.speedup(replace(first, at_most=True)) == f"≤{NBSP}1.44{NBSP}×"


def test_how_far_a_saving_may_be_off_is_said_where_it_is_known() -> None:
    first = results.ddp().found[0]
    assert formatting.noise(replace(first, error_ns=3 * MS)).replace(NBSP, " ") == "± 3.00 ms"
    for unknown in (0.0, math.nan, math.inf):
        assert formatting.noise(replace(first, error_ns=unknown)) == ""
    assert formatting.noise(replace(first, error_ns=3 * MS, scope="risk", saving_ns=0.0)) == ""
