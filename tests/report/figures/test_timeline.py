"""A timeline keeps its longest spans and every lane, however crowded."""

from __future__ import annotations

from dlprof.report import looks
from dlprof.report.figures import shapes
from dlprof.result import Panel


def test_a_timeline_draws_short_spans_upon_long_ones_in_their_lanes() -> None:
    rows = (("b", 0, 10, "short", "copy"), ("b", 0, 100, "long", "host"), ("a", 5, 7, "other lane", "nonsense"))
    figure = shapes.panel(Panel("timeline", "t", rows))
    assert figure.spec is not None
    trace = figure.spec["data"][0]
    assert trace["x"] == [100.0, 10.0, 7.0]
    assert trace["y"] == [0, 0, 1]
    assert trace["marker"]["color"] == [looks.LOOKS[c].light for c in ("host", "copy", "other")]
    assert figure.legend == ("copy", "host", "nonsense")


def test_of_lanes_of_one_group_the_first_tells_which() -> None:
    lanes = ("rank 0 · thread", "rank 0 · computation 7", "rank 1 · thread", "rank 1 · worker 0", "alone")
    figure = shapes.panel(Panel("timeline", "t", tuple((lane, 0, 5, "a", "copy") for lane in lanes)))
    assert figure.spec is not None
    arranged = figure.spec["layout"]
    assert arranged["yaxis"]["ticktext"] == ["rank 0 · thread", "computation 7", "rank 1 · thread", "worker 0", "alone"]
    assert [shape["y0"] for shape in arranged["shapes"]] == [1.5, 3.5]
    assert [row[0] for row in figure.table.rows] == list(lanes)


def test_lanes_that_stand_alone_are_not_parted() -> None:
    figure = shapes.panel(Panel("timeline", "t", tuple((f"stage {n} · rank {n}", 0, 5, "a", "copy") for n in (0, 1))))
    assert figure.spec is not None
    assert figure.spec["layout"]["yaxis"]["ticktext"] == ["stage 0 · rank 0", "stage 1 · rank 1"]
    assert figure.spec["layout"]["shapes"] == []


def test_a_crowded_timeline_keeps_the_longest_spans_and_loses_no_lane() -> None:
    rows = tuple(
        (f"lane {i % 7}", i * 100, 1 + i % 90 + (10_000 if i == 4321 else 0), f"k{i}", "copy") for i in range(20_000)
    )
    figure = shapes.panel(Panel("timeline", "t", rows))
    assert figure.spec is not None
    trace = figure.spec["data"][0]
    assert len(trace["x"]) <= shapes.SPANS
    assert any(text.startswith("k4321 ·") for text in trace["hovertext"])
    assert any("short spans" in text for text in trace["hovertext"])
    assert set(trace["y"]) == set(range(7))
    assert "20,000" in figure.note


def test_merged_spans_cover_each_of_their_own_and_no_other_lane() -> None:
    spans = [shapes.Span(f"lane {i % 3}", i * 7.0, 1 + i % 5, str(i), ("copy", "host")[i % 2]) for i in range(9000)]
    drawn, note = shapes.merge(spans, 300)
    assert note
    assert len(drawn) <= 300
    for span in spans[::50]:
        assert any(
            (d.lane, d.category) == (span.lane, span.category)
            and d.start <= span.start
            and span.start + span.dur <= d.start + d.dur
            for d in drawn
        )
    assert shapes.merge(spans[:300], 300) == (spans[:300], "")


def test_arrows_lead_from_lane_to_lane_and_are_in_the_table() -> None:
    rows = tuple((f"rank {n}", 0, 10_000_000, "x", "communication") for n in range(3))
    arrows = ((6e6, "rank 1", "rank 0", "0 for 1"), (8e6, "rank 1", "rank 2", "2 for 1"), (9e6, "rank 1", "gone", "x"))
    figure = shapes.panel(Panel("timeline", "t", rows, arrows=arrows))
    assert figure.spec is not None
    _, heads = figure.spec["data"]
    assert (heads["x"], heads["y"]) == ([6, 8], [0, 2])
    assert heads["marker"]["symbol"] == ["triangle-up", "triangle-down"]
    assert [(s["x0"], s["y0"], s["y1"]) for s in figure.spec["layout"]["shapes"]] == [(6, 1, 0), (8, 1, 2)]
    assert [row[0] for row in figure.table.rows][-2:] == ["0 for 1", "2 for 1"]
