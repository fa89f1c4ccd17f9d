"""What was tried, in words: measured and predicted side by side, and "nothing to gain" plainly."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from dlprof.plain import NBSP
from dlprof.report import html, terminal
from dlprof.report.tried import measured, panel, row, sentence
from dlprof.result.tried import Attempt, Gain, Tried, Verdict
from tests.fixtures import results

WORKERS = Attempt(
    {"loader.num_workers": 4},
    "gain",
    findings=("input_wait",),
    predicted=1.44,
    measured=Gain(1.412, 1.38, 1.44, 3),
    before_ns=214.6e6,
    after_ns=152e6,
)
FREEZE = Attempt({"gc.freeze": True}, "no_gain", measured=Gain(1.0, 0.99, 1.01, 3))
BEST = Tried("complete", (WORKERS, FREEZE), best=WORKERS, runs=7, steps=30, seconds=100)


def said(tried: Tried) -> str:
    return sentence(tried).replace(NBSP, " ")


def test_the_best_is_told_measured_and_predicted() -> None:
    assert said(BEST) == "Tried: loader.num_workers=4: 1.41 × measured (1.38 to 1.44), 1.44 × predicted."
    alone = replace(BEST, best=replace(WORKERS, predicted=None, numerics=True))
    assert "predicted" not in said(alone)
    assert "other numbers" in said(alone)


@dataclass(frozen=True)
class Case:
    """What was tried, and the words that a reader finds of it."""

    tried: Tried
    words: str


@pytest.mark.parametrize(
    "case",
    [
        Case(Tried("complete", (FREEZE,)), "nothing to gain from 1 change"),
        Case(Tried("complete", (FREEZE, replace(FREEZE, verdict="slower"))), "nothing to gain from 2 changes"),
        Case(Tried("complete"), "no change could be set"),
        Case(Tried("failed", why="no data"), "did not run again: no data"),
        Case(Tried("interrupted", (FREEZE, Attempt({"a.b": 1}, "not_tried"))), "interrupted and does not say of a.b=1"),
        Case(Tried("out_of_time", (replace(FREEZE, verdict="unclear"),)), "out of time and does not say of gc.freeze"),
        Case(Tried("complete", (replace(FREEZE, verdict="unclear"),)), "does not say of gc.freeze"),
    ],
    ids=lambda case: case.words,
)
def test_nothing_faster_is_told_with_what_is_not_known(case: Case) -> None:
    assert case.words in said(case.tried)


def test_a_gain_with_its_interval() -> None:
    assert measured(Gain(1.5, 1.4, 1.6, 3)).replace(NBSP, " ") == "1.50 × (1.40 to 1.60)"
    assert measured(Gain(1.5)).replace(NBSP, " ") == "1.50 × (once)"
    assert "over 100" in measured(Gain(1e9, 1e3, 1e12, 2))


@pytest.mark.parametrize("verdict", ["gain", "no_gain", "slower", "unclear", "not_counted", "not_tried"])
def test_every_verdict_has_words(verdict: Verdict) -> None:
    text = row(Attempt({"gc.freeze": True}, verdict, "because"))
    assert text.startswith("gc.freeze=True: ")
    assert text.endswith(", because")
    assert "_" not in text


def test_every_report_has_it() -> None:
    result = replace(results.ddp(), tried=BEST)
    assert "1.41 × measured (1.38 to 1.44), 1.44 × predicted" in terminal.render(result, 110)
    page = html.render(result)
    assert 'id="tried"' in page
    assert "loader.num_workers=4" in page
    assert 'id="tried"' not in html.render(results.ddp())


def test_the_pages_table_has_a_row_an_attempt() -> None:
    made = panel(replace(BEST, combinations=(FREEZE,)))
    assert [r[0] for r in made.rows] == ["loader.num_workers=4", "gc.freeze=True", "gc.freeze=True"]
    assert all(len(r) == len(made.columns) for r in made.rows)


def test_the_edit_is_on_the_page_and_what_is_in_it_stays_text() -> None:
    diff = "--- a/train.py\n+++ b/train.py\n-    x = '</script><b>'\n"
    page = html.render(replace(results.ddp(), tried=replace(BEST, diff=diff)))
    assert "+++ b/train.py" in page
    assert "</script><b>" not in page
