"""A scaling study in words, and as a page."""

from __future__ import annotations

import json

import pytest

from dlprof.analysis.scaling.predictions import studied
from dlprof.analysis.scaling.study import sizes
from dlprof.files import compact
from dlprof.report.compare.scale import growth, summary, told
from dlprof.report.compare.summary import page, text
from dlprof.result.scale import Study, to_json
from tests.fixtures.scaling import MS, at, latest, named, weak

STUDY = studied("train.py", sizes(named(a=weak(1), b=weak(2), c=weak(4), d=weak(8))))


def said(study: Study) -> str:
    made = summary(study)
    assert "<svg" in page(made) or "plotly" in page(made)
    return text(made, 110)


def test_speed_up_efficiency_and_what_grows() -> None:
    shown = said(STUDY)
    assert "8 ranks do" in shown
    assert "the samples a second of 1: an efficiency of" in shown
    assert "What grows: transfers between ranks by 1.70 ms" in shown
    assert f"waiting for other ranks by {latest(8) / MS:.2f} ms" in shown
    assert "weak scaling" in shown
    assert "Predicted from the smaller sizes, the step on 8 ranks is off by" in shown


def test_the_first_prediction_is_no_further_than_measured_accuracy() -> None:
    first = told(STUDY)
    assert first is not None
    assert first.ranks == 64
    assert "On 64 ranks" in said(STUDY)
    assert {p.ranks for p in STUDY.predictions} >= {16, 4096}


def test_growth_of_a_shared_batch_is_of_the_same_work() -> None:
    study = studied("job", sizes(named(a=at(1, 100, 64), b=at(2, 50, 64))))
    assert growth(study) == pytest.approx({"computation": 0.0})
    assert "No part of the step grows" in said(study)


def test_one_size_and_what_was_left_out() -> None:
    study = studied("job", sizes(named(a=weak(2)), [("broken", "cannot be read")]))
    shown = said(study)
    assert "One size is no scaling" in shown
    assert "broken is left out: cannot be read" in shown
    assert "Nothing is predicted: one size" in shown


def test_without_samples() -> None:
    assert "work a second" in said(studied("job", sizes(named(a=at(1, 100, 0), b=at(2, 125, 0)))))


def test_as_data() -> None:
    data = json.loads(compact(to_json(STUDY)))
    assert data["format"] == 1
    assert [s["ranks"] for s in data["sizes"]] == [1, 2, 4, 8]
    assert data["sizes"][0]["step_ns"] == pytest.approx(100 * MS, rel=0.01)
