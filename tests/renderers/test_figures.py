"""Figures are what plotly accepts, hold what the result holds, and stay as small as a screen."""

from __future__ import annotations

import json
import math
from typing import Any

import plotly.graph_objects as go  # type: ignore[import-untyped]
import pytest

from dlprof.renderers import bars, drawing, figures, lines, parts, timeline, words
from dlprof.result import Panel, Result
from tests.renderers import results


def every_figure(result: Result) -> list[drawing.Figure]:
    stack = parts.stack(result)
    evidence = [figures.panel(o.evidence) for o in result.found if o.evidence]
    return [f for f in ([stack] if stack else []) + evidence + [figures.panel(p) for p in result.panels] if f.spec]


@pytest.mark.parametrize("name", results.ALL)
def test_plotly_accepts_every_figure(name: str) -> None:
    for figure in every_figure(results.ALL[name]()):
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
    for figure in every_figure(results.hostile()):
        assert "template" not in json.dumps(figure.spec)


def test_every_figure_says_what_it_shows_and_has_a_table() -> None:
    for figure in every_figure(results.ddp()):
        assert len(figure.label) > 20
        assert figure.table.rows
        assert {len(row) for row in figure.table.rows} == {len(figure.table.columns)}


def test_the_stack_holds_each_rank_and_its_parts_add_up_to_the_step() -> None:
    figure = parts.stack(results.ddp())
    assert figure is not None
    assert figure.spec is not None
    traces = figure.spec["data"]
    assert figure.legend == ("computation", "communication", "copy", "input_wait", "checkpoint", "host", "other")
    assert [t["marker"]["color"] for t in traces] == [words.LOOKS[c].light for c in figure.legend]
    for i in range(4):
        assert sum(t["x"][i] for t in traces) == pytest.approx(214.6, rel=1e-4)
    assert [a["text"] for a in figure.spec["layout"]["annotations"]] == ["◀ finding 2", "◀ finding 1"]


def test_no_divided_step_no_stack() -> None:
    assert parts.stack(results.empty()) is None


@pytest.mark.parametrize("ranks", [16, 17, 128, 129, 1000])
def test_the_stack_stays_readable_for_any_number_of_ranks(ranks: int) -> None:
    figure = parts.stack(results.many(ranks))
    assert figure is not None
    assert figure.spec is not None
    layout = figure.spec["layout"]
    bars = len(figure.spec["data"][0]["x"])
    assert bars <= parts.SINGLE_RANKS
    assert layout["height"] <= 1000
    assert len(layout["yaxis"]["tickvals"]) <= 30
    assert bool(figure.note) == (ranks > parts.SINGLE_RANKS)
    if ranks > parts.SINGLE_RANKS:  # the slow one still stands by itself
        assert layout["yaxis"]["ticktext"][0] == "rank 37"
        assert figure.spec["data"][0]["x"][0] == pytest.approx(0.9 * 512)


def test_the_device_table_starts_with_the_mean_and_its_parts_are_shares_of_the_span() -> None:
    table = parts.device(results.ddp())
    assert table is not None
    assert [row[0] for row in table.rows] == ["mean", "0", "1", "2", "3"]
    assert table.rows[2][3].replace(words.NBSP, " ").endswith("· 4.0 %")
    assert parts.device(results.healthy()) is None


def test_few_bars_lie_and_many_stand() -> None:
    few = figures.panel(Panel("bars", "few", (("a", 1.5e6), ("b", 3e6, "copy")), unit="ns")).spec
    many = figures.panel(Panel("bars", "many", tuple((f"b{i}", i) for i in range(1000)))).spec
    assert few is not None
    assert many is not None
    assert (few["data"][0]["orientation"], few["data"][0]["x"]) == ("h", [1.5, 3.0])
    assert few["layout"]["xaxis"]["ticksuffix"].strip() == "ms"
    assert few["data"][0]["marker"]["color"] == [drawing.SERIES[0], words.LOOKS["copy"].light]
    assert many["data"][0]["orientation"] == "v"
    assert len(many["data"][0]["y"]) <= bars.BARS
    assert max(many["data"][0]["y"]) == 999


def test_labels_that_look_like_dates_or_repeat_stay_labels() -> None:
    spec = figures.panel(Panel("bars", "t", (("2024-01-01", 1), ("2024-01-01", 2), ("3", 4)))).spec
    assert spec is not None
    assert spec["data"][0]["y"] == [0, 1, 2]
    assert spec["layout"]["yaxis"]["ticktext"] == ["2024-01-01", "2024-01-01", "3"]


def test_thinned_lines_keep_every_spike_and_short_ones_every_point() -> None:
    values: list[float | None] = [1.0] * 50_000
    values[12_345], values[40_001] = 99.0, -99.0
    values[20_000:21_000] = [None] * 1000
    keep = lines.downsample(values, 2000)
    assert len(keep) <= 2000
    assert {0, 12_345, 40_001, 49_999} <= set(keep)
    assert any(values[i] is None for i in keep)
    assert keep == sorted(keep)
    assert lines.downsample(values[:100], 2000) == list(range(100))


def test_lines_keep_to_the_points_of_a_screen_and_say_so() -> None:
    panel = Panel("lines", "t", tuple((i, math.sin(i), -i) for i in range(30_000)), ("step", "a", "input_wait"), "ns")
    figure = figures.panel(panel)
    assert figure.spec is not None
    a, wait = figure.spec["data"]
    assert max(len(a["x"]), len(wait["x"])) <= lines.POINTS
    assert "Thinned" in figure.note
    assert wait["line"]["color"] == words.LOOKS["input_wait"].light
    assert a["line"]["color"] not in {look.light for look in words.LOOKS.values()}
    assert [row[1] for row in figure.table.rows] == ["30,000", "30,000"]


def test_what_is_no_number_is_a_gap() -> None:
    figure = figures.panel(Panel("lines", "t", ((0, 1.0), (1, math.nan), (2, None), (3, math.inf)), ("x", "y")))
    assert figure.spec is not None
    assert figure.spec["data"][0]["y"] == [1.0, None, None, None]


def test_a_timeline_draws_short_spans_upon_long_ones_in_their_lanes() -> None:
    rows = (("b", 0, 10, "short", "copy"), ("b", 0, 100, "long", "host"), ("a", 5, 7, "other lane", "nonsense"))
    figure = figures.panel(Panel("timeline", "t", rows))
    assert figure.spec is not None
    trace = figure.spec["data"][0]
    assert trace["x"] == [100.0, 10.0, 7.0]
    assert trace["y"] == [0, 0, 1]
    assert trace["marker"]["color"] == [words.LOOKS[c].light for c in ("host", "copy", "other")]
    assert figure.legend == ("copy", "host", "nonsense")


def test_a_crowded_timeline_keeps_the_longest_spans_and_loses_no_lane() -> None:
    rows = tuple(
        (f"lane {i % 7}", i * 100, 1 + i % 90 + (10_000 if i == 4321 else 0), f"k{i}", "copy") for i in range(20_000)
    )
    figure = figures.panel(Panel("timeline", "t", rows))
    assert figure.spec is not None
    trace = figure.spec["data"][0]
    assert len(trace["x"]) <= timeline.SPANS
    assert any(text.startswith("k4321 ·") for text in trace["hovertext"])
    assert any("short spans, together" in text for text in trace["hovertext"])
    assert set(trace["y"]) == set(range(7))
    assert "20,000" in figure.note


def test_spans_drawn_together_cover_each_of_their_own_and_no_other_lane() -> None:
    spans = [timeline.Span(f"lane {i % 3}", i * 7.0, 1 + i % 5, str(i), ("copy", "host")[i % 2]) for i in range(9000)]
    drawn, note = timeline.merge(spans, 300)
    assert note
    assert len(drawn) <= 300
    for span in spans[::50]:
        assert any(
            (d.lane, d.category) == (span.lane, span.category)
            and d.start <= span.start
            and span.start + span.dur <= d.start + d.dur
            for d in drawn
        )
    assert timeline.merge(spans[:300], 300) == (spans[:300], "")


def test_columns_of_figures_are_told_from_columns_of_words() -> None:
    rows = (("7", 7, "14.6 ms", "5 of 8", "aten::add", "", None), ("1", 1.5, "31 %", "0 of 8", "12 Monkeys", "", 4))
    assert figures.panel(Panel("table", "t", rows)).table.numeric == (False, True, True, True, False, False, True)


def test_long_tables_are_cut_with_a_word_and_cells_carry_units() -> None:
    panel = Panel(
        "table",
        "t",
        tuple((f"r{i}", 1.5e6, 0.25, 2048) for i in range(drawing.ROWS + 30)),
        ("name", "mean_ns", "x_share", "n_bytes"),
    )
    table = figures.panel(panel).table
    assert len(table.rows) == drawing.ROWS
    assert table.note == "30 more rows are in result.json."
    assert table.columns == ("name", "mean", "x share", "n")
    assert [c.replace(words.NBSP, " ") for c in table.rows[0]] == ["r0", "1.50 ms", "25 %", "2.05 kB"]
    assert table.numeric == (False, True, True, True)


@pytest.mark.parametrize("shape", ["table", "bars", "lines", "areas", "timeline", "flame"])
def test_a_panel_without_rows_is_drawn_empty(shape: Any) -> None:
    figure = figures.panel(Panel(shape, "nothing", ()))
    if figure.spec:
        go.Figure(figure.spec)
    assert figure.title == "nothing"


def test_text_on_a_bar_stands_out_in_both_themes() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for look in words.DRAWN.values():
        for background in (look.light, look.dark):
            low, high = sorted((luminance(drawing.inside(look.light)), luminance(background)))
            assert (high + 0.05) / (low + 0.05) >= 3, look.name  # WCAG 2.1, 1.4.11


def test_a_flame_graph_stands_callers_above_what_they_call() -> None:
    rows = ((0, 0, 10, "rest", "host"), (1, 0, 7, "f", "own"), (2, 0, 3, "g", "library"), (1, 7, 2, "g", "library"))
    figure = figures.panel(Panel("flame", "t", rows, unit="samples"))
    assert figure.spec is not None
    [trace] = figure.spec["data"]
    assert sorted(zip(trace["y"], trace["base"], trace["x"], trace["text"], strict=True)) == [
        (0, 0, 10, "rest"),
        (1, 0, 7, "f"),
        (1, 7, 2, "g"),
        (2, 0, 3, "g"),
    ]
    assert figure.table.rows[2] == ("g", "Libraries", "5\u00a0samples", "50\u00a0%")
    assert figure.legend == ("own", "library")


def test_areas_are_stacked_in_the_colours_of_their_categories() -> None:
    rows = ((0, 1e6, 2e6), (1e9, 3e6, 4e6))
    figure = figures.panel(Panel("areas", "t", rows, ("time_ns", "input_wait", "backward"), "ns"))
    assert figure.spec is not None
    assert [t["fillcolor"] for t in figure.spec["data"]] == [words.DRAWN[c].light for c in ("input_wait", "backward")]
    assert [t["y"] for t in figure.spec["data"]] == [[1.0, 3.0], [2.0, 4.0]]
    assert figure.spec["data"][0]["x"] == [0, 1]  # seconds, like all that stands on the run's time


def test_marks_stand_above_the_lines_with_their_words() -> None:
    marks = ((1e9, "step 1: <b>", "checkpoint"), (2e9, "step 2", "epoch"), (math.nan, "never", "epoch"))
    panel = Panel("lines", "t", ((0, 1e6), (3e9, 3e6)), ("time_ns", "rank 0"), "ns", marks=marks)
    figure = figures.panel(panel)
    assert figure.spec is not None
    line, *marked = figure.spec["data"]
    assert [(t["x"], t["hovertext"]) for t in marked] == [([1], ["step 1: &lt;b&gt;"]), ([2], ["step 2"])]
    assert all(t["y"][0] > max(line["y"]) for t in marked)
    assert figure.legend == ("checkpoint", "epoch")
    assert [row[0] for row in figure.table.rows] == ["rank 0", "step 1: <b>", "step 2"]
