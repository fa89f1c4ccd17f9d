"""Figures carry units that suit them, and text from anywhere is safe to show."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from dlprof.analysis.estimate import change
from dlprof.plain import NBSP, plain
from dlprof.report import formatting
from dlprof.result import CATEGORIES, Forecast
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


def test_every_category_is_drawn_and_none_like_another() -> None:
    assert tuple(formatting.LOOKS) == CATEGORIES
    for kind in ("name", "light", "dark", "ansi", "glyph"):
        assert len({getattr(look, kind) for look in formatting.LOOKS.values()}) == len(CATEGORIES), kind


def test_plain_escapes_what_acts_and_keeps_what_is_written() -> None:
    assert plain("a\x1b[31m\x00\u202eb\ud800\n") == "a\\x1b[31m\\x00\\u202eb\\ud800\\x0a"
    assert plain("naïve – שלום 漢字 \u00a0") == "naïve – שלום 漢字 \u00a0"
    assert plain("a\nb", keep="\n") == "a\nb"
    assert plain("abcdef", 4) == "abc…"


def test_headline_is_the_verdict_of_the_dearest_finding_and_its_gain() -> None:
    diagnosis, gain, _ = formatting.headline(results.ddp())
    assert diagnosis == "31 % of each step waits for data on rank 1."
    assert "1.44" in gain


def test_findings_together_are_bounded_where_there_are_several() -> None:
    said = formatting.together(results.ddp()).replace(NBSP, " ")
    assert said == "All of these together: at most 1.79 × faster (−94.8 ms)."
    assert formatting.together(results.many()) == ""
    assert formatting.together(results.healthy()) == ""
    assert formatting.together(results.hostile()) == ""


def test_headline_of_a_healthy_run_says_what_fills_the_step_and_what_was_not_checked() -> None:
    diagnosis, gain, _ = formatting.headline(results.healthy())
    assert diagnosis.startswith("Computation takes 89")
    assert "5" in gain
    assert "2 could not be measured" in gain


def test_no_finding_is_told_before_a_larger_part_that_nobody_could_judge() -> None:
    result = results.ddp()
    found = result.found[0]
    parts = {"computation": 0.05, "queued_wait": found.share + 0.2}
    parts["input_wait"] = 1 - sum(parts.values())
    mute = results.outcome("queued_wait", "not_measured", "Queued work that waits", why="it is a graph")
    result = replace(result, time=results.time_of(0, 42.0, **parts), outcomes=(*result.outcomes, mute))
    first, second, _ = (text.replace(NBSP, " ") for text in formatting.headline(result))
    assert first.endswith("of each step the device idles with work queued: it is a graph.")
    assert second.startswith("Beside that: 31 % of each step waits for data on rank 1.")
    # A smaller one does not come first.
    parts |= {"queued_wait": found.share - 0.1}
    parts["input_wait"] = 1 - parts["computation"] - parts["queued_wait"]
    result = replace(result, time=results.time_of(0, 42.0, **parts))
    assert formatting.headline(result)[0].startswith("31")


def test_a_step_that_computes_nearly_all_of_the_time_says_so_before_a_finding() -> None:
    result = results.ddp()
    small = replace(result.found[0], share=0.04)
    others = tuple(o for o in result.outcomes if o.state != "found")
    time = results.time_of(0, 42.0, computation=0.95, input_wait=0.05)
    said = formatting.headline(replace(result, time=time, outcomes=(small, *others)))[0].replace(NBSP, " ")
    assert said.startswith("Computation takes 95 % of each step. 31 % of each step waits")


def test_headline_of_a_run_without_steps_claims_nothing() -> None:
    diagnosis, gain, _ = formatting.headline(results.empty())
    assert diagnosis == "No steady step was recorded."
    assert gain.startswith("No rule could be checked")


def test_why_nothing_is_said_of_what_takes_most_of_the_step() -> None:
    result = results.healthy()
    parts = {"host": 0.9, "computation": 0.1}
    late = replace(result, time=results.time_of(0, 42.0, **parts))
    mute = results.outcome("host_bound", "not_measured", "Waiting for the host", why="1 kernel a step")
    said = formatting.headline(replace(late, outcomes=(*result.outcomes, mute)))
    assert said[0].replace(NBSP, " ") == "90 % of each step waits for the host: 1 kernel a step."
    assert said[1] == formatting.headline(replace(result, outcomes=(*result.outcomes, mute)))[1]
    fine = formatting.headline(replace(result, outcomes=(*result.outcomes, mute)))
    assert "1 kernel a step" not in " ".join(fine)


def test_what_was_not_told_apart_is_not_named_as_what_takes_most() -> None:
    time = results.time_of(0, 42.0, other=0.7, copy=0.2, host=0.1)
    said = formatting.headline(replace(results.healthy(), time=time))[0].replace(NBSP, " ")
    assert said == "70 % of each step is nothing that was told apart, and no more is known of it."
    alone = replace(results.healthy(), time=results.time_of(0, 42.0, other=1.0))
    untold = "100 % of each step is nothing that was told apart, and no more is known of it."
    assert formatting.headline(alone)[0].replace(NBSP, " ") == untold


def test_how_far_traced_steps_stand_for_the_job() -> None:
    result = results.ddp()
    window = result.window
    assert window is not None
    assert formatting.limits(result).replace(NBSP, " ") == "5 traced steps took 1.04 × as long as the others"
    assert formatting.limits(replace(result, window=replace(window, overhead=None))) == ""
    traced = replace(result, window=replace(window, overhead=None, source="trace"))
    assert formatting.limits(traced).startswith("every step was traced")
    assert formatting.headline(traced)[1].replace(NBSP, " ") == "Fixing it would make the traced steps 1.44 × faster."
    one = replace(result, window=replace(window, overhead=None, source="trace", steps=1))
    assert formatting.limits(one).startswith("the one step was traced")
    whole = replace(result, window=replace(window, overhead=None, source="trace", unit="trace"))
    assert formatting.limits(whole) == formatting.limits(replace(result, window=None)) == ""


def test_notices_say_how_the_run_ended_and_what_it_warned_of() -> None:
    killed, missing = formatting.notices(results.empty())
    assert "signal 9" in killed
    assert missing == "3 of 4 ranks are not here: 1, 2, 3"
    assert formatting.notices(results.healthy()) == []


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


def test_the_setting_that_a_saving_was_predicted_for_is_its_remedy() -> None:
    result = results.ddp()
    first = result.found[0]
    step = 214.6 * MS

    def gain(*forecasts: Forecast, workers: int = 6) -> str:
        told = replace(first, forecasts=forecasts, changes=(change("more workers", num_workers=(2, workers)),))
        return formatting.headline(replace(result, outcomes=(told, *result.outcomes[1:])))[1].replace(NBSP, " ")

    near = Forecast("num_workers", "6", step - 1.05 * first.saving_ns)
    assert gain(near) == "num_workers=6 would make this job 1.44 × faster."
    assert (
        gain(Forecast("num_workers", "6", step - 0.5 * first.saving_ns))
        == "Fixing it would make this job 1.44 × faster."
    )
    assert gain(near, workers=60) == "Fixing it would make this job 1.44 × faster."
    assert gain() == "Fixing it would make this job 1.44 × faster."


def test_the_noise_of_a_saving_is_twice_its_standard_error_where_it_is_known() -> None:
    first = results.ddp().found[0]
    assert formatting.noise(replace(first, noise_ns=1.5 * MS)).replace(NBSP, " ") == "± 3.00 ms"
    for unknown in (0.0, math.nan, math.inf):
        assert formatting.noise(replace(first, noise_ns=unknown)) == ""
    assert formatting.noise(replace(first, noise_ns=1.5 * MS, scope="risk", saving_ns=0.0)) == ""
