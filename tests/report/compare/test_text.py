"""The comparison's lines fit, begin with verdict and prediction, and repeat nothing that a terminal would obey."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import replace

import pytest

from dlprof.analysis.compare.predictions import CameTrue
from dlprof.report.compare import text as compare_text
from dlprof.report.terminal import columns
from tests.fixtures import comparisons


@pytest.mark.parametrize("width", [40, 80, 110])
@pytest.mark.parametrize("name", comparisons.ALL)
def test_every_line_fits(name: str, width: int) -> None:
    for line in compare_text.render(comparisons.ALL[name](), width).split("\n"):
        assert columns(line) <= width, line


@pytest.mark.parametrize("name", comparisons.ALL)
def test_colour_changes_nothing_but_colour_and_nothing_else_acts(name: str) -> None:
    c = comparisons.ALL[name]()
    text = compare_text.render(c, 100)
    assert re.sub(r"\x1b\[[0-9;]*m", "", compare_text.render(c, 100, colour=True)) == text
    assert {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")} - {"\n"} == set()


def test_the_verdict_and_the_prediction_come_first() -> None:
    lines = [line.strip() for line in compare_text.render(comparisons.fixed(), 200).split("\n")]
    assert lines[0].startswith("A  ")
    assert lines[1].startswith("B  ")
    assert lines[3] == "B is 1.25 × faster: a step takes 171.7 ms instead of 214.6 ms."
    assert lines[4] == (
        "Predicted 148.6 ms for num_workers 2 → 6, measured 171.7 ms ± 1.13 ms: less than predicted,"
        " 65 % of the gain (predicted by input_wait)."
    )


def test_what_became_of_the_findings_and_which_settings_differ_is_there() -> None:
    text = compare_text.render(comparisons.fixed(), 100)
    assert re.search(r"gone +input_wait +66.0 ms → 500.0 µs", text)
    assert "Loader · num_workers: 2 → 6" in text


def test_the_same_run_twice_is_no_difference() -> None:
    text = compare_text.render(comparisons.ALL["same"](), 100)
    assert "No difference beyond noise: a step takes 214.6 ms in A and 214.6 ms in B." in text
    assert "settings that differ" not in text


def test_without_noise_nothing_is_claimed() -> None:
    c = comparisons.ALL["other"]()
    assert "the devices differ" in compare_text.render(c, 400)
    assert "cannot be compared" in compare_text.render(comparisons.ALL["empty"](), 400)


@pytest.mark.parametrize(
    ("reached", "verdict", "said"), [(-12.5, "missed", False), (0.65, "partly", True), (40.0, "better", False)]
)
def test_a_share_of_the_gain_is_said_where_it_says_something(reached: float, verdict: CameTrue, said: bool) -> None:
    c = comparisons.fixed()
    assert c.prediction is not None
    assert c.step is not None
    prediction = replace(c.prediction, reached=reached, verdict=verdict)
    assert ("of the gain" in compare_text.came_true(prediction, c.step)) is said


def test_a_missed_prediction_of_a_slower_step_says_slower() -> None:
    c = comparisons.fixed()
    assert c.prediction is not None
    assert c.step is not None
    missed = replace(c.prediction, reached=-12.5, verdict="missed")
    slower = replace(c.step, a_ns=c.step.b_ns, b_ns=c.step.a_ns)
    assert "slower instead" in compare_text.came_true(missed, slower)
    assert "no gain" in compare_text.came_true(missed, c.step)
