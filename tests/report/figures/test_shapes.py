"""Figures are what plotly accepts, hold what the result holds, and stay as small as a screen."""

from __future__ import annotations

import json
from typing import Any

import plotly.graph_objects as go
import pytest

from dlprof.report.figures import drawing, parts, shapes
from dlprof.result import Panel, Result
from dlprof.units import UNKNOWN
from tests.fixtures import results


def every_figure(result: Result) -> list[drawing.Figure]:
    stack = parts.stack(result)
    evidence = [shapes.panel(o.evidence) for o in result.found if o.evidence]
    blame = parts.blame(result)
    drawn = [f for f in (stack, blame) if f]
    return [f for f in drawn + evidence + [shapes.panel(p) for p in result.panels] if f.spec]


@pytest.mark.parametrize("name", results.ALL)
def test_plotly_accepts_every_figure(name: str) -> None:
    drawn = every_figure(results.ALL[name]())
    assert drawn or name == "empty"
    for figure in drawn:
        go.Figure(figure.spec)
        json.dumps(figure.spec, allow_nan=False)


def texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [t for v in value.values() for t in texts(v)]
    if isinstance(value, list):
        return [t for v in value for t in texts(v)]
    return [value] if isinstance(value, str) else []


def test_plotly_gets_no_markup_from_a_trace_and_no_long_text() -> None:
    drawn = [t for f in every_figure(results.hostile()) for t in texts(f.spec)]
    assert any("&lt;script&gt;" in t for t in drawn)
    for text in drawn:
        assert "<" not in text
        assert len(text) < 1000


def test_no_figure_makes_a_template_of_a_text() -> None:
    figures = every_figure(results.hostile())
    assert figures
    for figure in figures:
        assert "template" not in json.dumps(figure.spec)


def test_every_figure_says_what_it_shows_and_has_a_table() -> None:
    figures = every_figure(results.ddp())
    assert figures
    for figure in figures:
        assert len(figure.label) > 20
        assert figure.table.rows
        assert {len(row) for row in figure.table.rows} == {len(figure.table.columns)}


@pytest.mark.parametrize("shape", ["table", "bars", "lines", "areas", "timeline", "flame"])
def test_a_panel_without_rows_is_drawn_empty(shape: Any) -> None:
    figure = shapes.panel(Panel(shape, "nothing", ()))
    if figure.spec:
        go.Figure(figure.spec)
    assert figure.title == "nothing"


def test_columns_in_which_nothing_is_known_are_left_out_and_named() -> None:
    rows = (("a", None, 1.0, "", None), ("b", UNKNOWN, 2.0, "", 3.0))
    figure = shapes.panel(Panel("table", "t", rows, ("name", "rate", "time", "mark", "some"), note="Of a step."))
    assert figure.table.columns == ("name", "time", "mark", "some")
    assert [len(row) for row in figure.table.rows] == [4, 4]
    assert len(figure.table.numeric) == 4
    assert figure.note == "Of a step. Unknown for this run: rate."


def test_bars_of_shares_stay_with_their_column_where_another_is_left_out() -> None:
    rows = tuple((f"r{i}", None, 1.0, 0.25) for i in range(drawing.BARRED))
    figure = shapes.panel(Panel("table", "t", rows, ("name", "rate", "time", "of it_share")))
    assert figure.table.columns == ("name", "time", "of it share")
    assert figure.table.shares == (("", "", "25"),) * len(rows)
