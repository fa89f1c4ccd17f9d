"""Figures hold what the result holds, are what plotly accepts, stay as small as a screen, and have a table each."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go
import pytest
from msgspec.structs import replace

from dlprof.plain import NBSP
from dlprof.report import html, looks, terminal
from dlprof.report.figures import drawing, memory, modules, ranks, shapes
from dlprof.result import Blame, Panel, Result, RunInfo, TimePart
from dlprof.result.figures import DeviceMemory, Footprint, Member, MemoryChange, MemoryPart, ModuleMemory, Modules
from dlprof.units import UNKNOWN
from tests.fixtures import results
from tests.fixtures.results import MS

GB = 1e9


def spec(figure: drawing.Figure | None) -> Any:
    assert figure is not None
    assert figure.spec is not None
    return figure.spec


def cells(table: drawing.Table, *rows: int) -> list[list[str]]:
    return [[cell.replace(NBSP, " ") for cell in table.rows[row]] for row in rows or range(len(table.rows))]


# What holds for all figures.


def every_figure(result: Result) -> list[drawing.Figure]:
    drawn = [f for f in (ranks.stack(result), ranks.blame(result)) if f]
    drawn += [shapes.panel(p) for p in (*(o.evidence for o in result.found if o.evidence), *result.panels)]
    return [f for f in drawn if f.spec]


def texts(value: Any) -> list[str]:
    if isinstance(value, (dict, list)):
        return [t for v in (value.values() if isinstance(value, dict) else value) for t in texts(v)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("name", results.ALL)
def test_plotly_accepts_every_figure_and_each_has_a_label_and_a_table(name: str) -> None:
    drawn = every_figure(results.ALL[name]())
    assert drawn or name == "empty"
    for figure in drawn:
        go.Figure(figure.spec)
        json.dumps(figure.spec, allow_nan=False)
        assert len(figure.label) > 20
        assert {len(row) for row in figure.table.rows} <= {len(figure.table.columns)}


def test_plotly_gets_no_markup_no_template_and_no_long_text_from_a_trace() -> None:
    figures = every_figure(results.hostile())
    drawn = [t for f in figures for t in texts(f.spec)]
    assert any("&lt;script&gt;" in t for t in drawn)
    assert not any("<" in t or len(t) >= 1000 for t in drawn)
    assert not any("template" in json.dumps(f.spec) for f in figures)


@pytest.mark.parametrize("shape", ["table", "bars", "lines", "areas", "timeline", "flame"])
def test_a_panel_without_rows_is_drawn_empty(shape: Any) -> None:
    figure = shapes.panel(Panel(shape, "nothing", ()))
    go.Figure(figure.spec or {})
    assert figure.title == "nothing"


# Tables.


def test_columns_of_numbers_are_told_from_columns_of_words() -> None:
    rows = (("7", 7, "5 of 8", "", None, True), ("1", 1.5, "0 of 8", "", 4, False))
    assert shapes.panel(Panel("table", "t", rows)).table.numeric == (False, True, False, False, True, False)


def test_long_tables_are_cut_and_cells_carry_units() -> None:
    rows = tuple((f"r{i}", 1.5e6, 0.25, 2048, 1.438) for i in range(drawing.ROWS + 30))
    columns = ("name", "mean_ns", "x_share", "n_bytes", "speed_times")
    table = shapes.panel(Panel("table", "t", rows, columns)).table
    assert (len(table.rows), table.note) == (drawing.ROWS, "30 more rows are in result.json.")
    assert table.columns == ("name", "mean", "x share", "n", "speed")
    assert cells(table, 0) == [["r0", "1.50 ms", "25 %", "2.05 kB", "1.44 ×"]]
    assert table.numeric == (False, True, True, True, True)


def test_columns_of_shares_have_bars_as_wide_as_the_shares() -> None:
    rows = (("a", 0.31, 1.2e7, 1.4), ("b", 0.0004, 3, ""), ("c", None, None, 0))
    columns = ("name", "x_share", "takes_ns", "of it_share")
    table = shapes.panel(Panel("table", "t", rows, columns)).table
    assert cells(table) == [["a", "31 %", "12.0 ms", "140 %"], ["b", "< 0.1 %", "3 ns", ""], ["c", "—", "—", "0 %"]]
    assert table.shares == (("", "31", "", "100"), ("", "0.04", "", ""), ("", "", "", "0"))
    assert shapes.panel(Panel("table", "t", rows[:2], columns)).table.shares == ()


def test_columns_in_which_nothing_is_known_are_left_out_and_named() -> None:
    rows = (("a", None, 1.0, "", None), ("b", UNKNOWN, 2.0, "", 3.0))
    figure = shapes.panel(Panel("table", "t", rows, ("name", "rate", "time", "mark", "some"), note="Of a step."))
    assert figure.table.columns == ("name", "time", "mark", "some")
    assert [len(row) for row in figure.table.rows] == [4, 4] == [len(figure.table.numeric)] * 2
    assert figure.note == "Of a step. Unknown for this run: rate."
    shares = tuple((f"r{i}", None, 1.0, 0.25) for i in range(drawing.BARRED))
    table = shapes.panel(Panel("table", "t", shares, ("name", "rate", "time", "of it_share"))).table
    assert table.shares == (("", "", "25"),) * len(shares)


def test_text_on_a_bar_stands_out_in_both_themes() -> None:
    def luminance(colour: str) -> float:
        rgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in rgb]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for look in looks.DRAWN.values():
        for background in (look.light, look.dark):
            low, high = sorted((luminance(drawing.inside(look.light)), luminance(background)))
            assert (high + 0.05) / (low + 0.05) >= 3, look.name  # WCAG 2.1, 1.4.11
    inks = [drawing.inside(grey) for grey in ("#757575", "#777777")]  # of luminance 0.178 and 0.184
    assert inks == [drawing.ON_DARK, drawing.ON_LIGHT]


# Bars, flame graphs, lines and areas.


def test_few_bars_lie_many_stand_and_labels_stay_labels() -> None:
    few = spec(shapes.panel(Panel("bars", "few", (("a", 1.5e6), ("b", 3e6, "copy")), unit="ns")))
    many = spec(shapes.panel(Panel("bars", "many", tuple((f"b{i}", i) for i in range(1000)))))
    assert (few["data"][0]["orientation"], few["data"][0]["x"]) == ("h", [1.5, 3.0])
    assert few["layout"]["xaxis"]["ticksuffix"].strip() == "ms"
    assert few["data"][0]["marker"]["color"] == [drawing.SERIES[0], looks.LOOKS["copy"].light]
    assert many["data"][0]["orientation"] == "v"
    assert len(many["data"][0]["y"]) <= shapes.BARS
    assert max(many["data"][0]["y"]) == 999
    dates = spec(shapes.panel(Panel("bars", "t", (("2024-01-01", 1), ("2024-01-01", 2), ("3", 4)))))
    assert dates["data"][0]["y"] == [0, 1, 2]
    assert dates["layout"]["yaxis"]["ticktext"] == ["2024-01-01", "2024-01-01", "3"]


def test_a_flame_graph_draws_each_frame_under_its_caller() -> None:
    rows = ((0, 0, 10, "rest", "host"), (1, 0, 7, "f", "own"), (2, 0, 3, "g", "library"), (1, 7, 2, "g", "library"))
    figure = shapes.panel(Panel("flame", "t", rows, unit="samples"))
    [trace] = spec(figure)["data"]
    drawn = sorted(zip(trace["y"], trace["base"], trace["x"], trace["text"], strict=True))
    assert drawn == [(0, 0, 10, "rest"), (1, 0, 7, "f"), (1, 7, 2, "g"), (2, 0, 3, "g")]
    assert cells(figure.table, 2) == [["g", "Libraries", "5 samples", "50 %"]]
    assert figure.legend == ("own", "library")


def test_thinned_lines_keep_every_spike_and_short_ones_every_point() -> None:
    values: list[float | None] = [1.0] * 50_000
    values[12_345], values[40_001] = 99.0, -99.0
    values[20_000:21_000] = [None] * 1000
    keep = shapes.downsample(values, 2000)
    assert len(keep) <= 2000
    assert {0, 12_345, 40_001, 49_999} <= set(keep)
    assert any(values[i] is None for i in keep)
    assert keep == sorted(keep)
    assert shapes.downsample(values[:100], 2000) == list(range(100))


def test_a_line_of_many_points_is_thinned_and_says_so() -> None:
    panel = Panel("lines", "t", tuple((i, math.sin(i), -i) for i in range(30_000)), ("step", "a", "input_wait"), "ns")
    figure = shapes.panel(panel)
    a, wait = spec(figure)["data"]
    assert max(len(a["x"]), len(wait["x"])) <= shapes.POINTS
    assert "Thinned" in figure.note
    assert wait["line"]["color"] == looks.LOOKS["input_wait"].light
    assert a["line"]["color"] not in {look.light for look in looks.LOOKS.values()}
    assert [row[1] for row in figure.table.rows] == ["30,000", "30,000"]
    gaps = Panel("lines", "t", ((0, 1.0), (1, math.nan), (2, None), (3, math.inf)), ("x", "y"))
    assert spec(shapes.panel(gaps))["data"][0]["y"] == [1.0, None, None, None]


def test_marks_stand_above_the_lines_with_their_words() -> None:
    marks = ((1e9, "step 1: <b>", "checkpoint"), (2e9, "step 2", "epoch"), (math.nan, "never", "epoch"))
    figure = shapes.panel(Panel("lines", "t", ((0, 1e6), (3e9, 3e6)), ("time_ns", "rank 0"), "ns", marks=marks))
    line, *marked = spec(figure)["data"]
    assert [(t["x"], t["hovertext"]) for t in marked] == [([1], ["step 1: &lt;b&gt;"]), ([2], ["step 2"])]
    assert all(t["y"][0] > max(line["y"]) for t in marked)
    assert figure.legend == ("checkpoint", "epoch")
    assert [row[0] for row in figure.table.rows] == ["rank 0", "step 1: <b>", "step 2"]


def test_a_first_step_that_dwarfs_all_others_is_cut_off_and_named() -> None:
    rows = tuple((n * 1e9, 9e9 if n == 0 else (2e7 if n == 30 else 1e7)) for n in range(60))
    figure = shapes.panel(Panel("lines", "t", rows, ("time_ns", "rank 0"), "ns", marks=((0.0, "step 0", "epoch"),)))
    line, mark = spec(figure)["data"]
    assert spec(figure)["layout"]["yaxis"]["range"] == [0, 20]  # ms
    assert line["y"][0] == 9000
    assert mark["y"][0] < 20
    assert figure.note.replace(NBSP, " ") == "The axis ends at 20.0 ms: 1 point above it, the highest 9.00 s."
    assert cells(figure.table, 0)[0][-1] == "9.00 s"
    # Neither a peak of three times the others nor another unit is cut.
    for unit, factor in (("ns", 3), ("bytes", 1000)):
        values = tuple((x, 1e7 * (factor if not x else 1)) for x, _ in rows)
        figure = shapes.panel(Panel("lines", "t", values, ("time_ns", "rank 0"), unit))
        assert ("range" in spec(figure)["layout"]["yaxis"], figure.note) == (False, "")


def test_areas_are_stacked_in_their_colours_and_as_high_as_their_sum() -> None:
    rows = ((0, 1e6, 2e6), (1e9, 3e6, 4e6))
    drawn = spec(shapes.panel(Panel("areas", "t", rows, ("time_ns", "input_wait", "backward"), "ns")))["data"]
    assert [t["fillcolor"] for t in drawn] == [looks.DRAWN[c].light for c in ("input_wait", "backward")]
    assert [t["y"] for t in drawn] == [[1.0, 3.0], [2.0, 4.0]]
    assert drawn[0]["x"] == [0, 1]  # seconds, as in all figures over the run's time
    peaks = (*((n * 1e9, 1e7, 1e7) for n in range(59)), (59e9, 1e8, 1e9))
    tall = spec(shapes.panel(Panel("areas", "t", peaks, ("time_ns", "forward", "backward"), "ns")))
    assert tall["layout"]["yaxis"]["range"] == [0, 40]


def test_the_pointer_shows_the_step_of_a_point_once() -> None:
    rows = tuple((n * 1e9, 1e6, 2e6) for n in range(5))
    panel = Panel("lines", "t", rows, ("time_ns", "rank 0", "rank 1"), "ns", steps=(7, 8, 9, 10, 12))
    first, second = spec(shapes.panel(panel))["data"]
    assert first["customdata"] == [7, 8, 9, 10, 12]
    assert "step %{customdata}" in first["hovertemplate"]
    assert "customdata" not in second


# Timelines.


def test_a_timeline_draws_short_spans_over_long_ones_in_their_lanes() -> None:
    rows = (("b", 0, 10, "short", "copy"), ("b", 0, 100, "long", "host"), ("a", 5, 7, "other lane", "nonsense"))
    figure = shapes.panel(Panel("timeline", "t", rows))
    trace = spec(figure)["data"][0]
    assert (trace["x"], trace["y"]) == ([100.0, 10.0, 7.0], [0, 0, 1])
    assert trace["marker"]["color"] == [looks.LOOKS[c].light for c in ("host", "copy", "other")]
    assert figure.legend == ("copy", "host", "nonsense")


def test_the_first_lane_of_a_group_names_the_group_and_lines_divide_groups() -> None:
    lanes = ("rank 0 · thread", "rank 0 · computation 7", "rank 1 · thread", "rank 1 · worker 0", "alone")
    figure = shapes.panel(Panel("timeline", "t", tuple((lane, 0, 5, "a", "copy") for lane in lanes)))
    layout = spec(figure)["layout"]
    assert layout["yaxis"]["ticktext"] == ["rank 0 · thread", "computation 7", "rank 1 · thread", "worker 0", "alone"]
    assert [shape["y0"] for shape in layout["shapes"]] == [1.5, 3.5]
    assert [row[0] for row in figure.table.rows] == list(lanes)
    rows = tuple((f"stage {n} · rank {n}", 0, 5, "a", "copy") for n in (0, 1))
    layout = spec(shapes.panel(Panel("timeline", "t", rows)))["layout"]
    assert (layout["yaxis"]["ticktext"], layout["shapes"]) == (["stage 0 · rank 0", "stage 1 · rank 1"], [])


def test_a_crowded_timeline_keeps_the_longest_spans_and_all_lanes() -> None:
    rows = tuple(
        (f"lane {i % 7}", i * 100, 1 + i % 90 + (10_000 if i == 4321 else 0), f"k{i}", "copy") for i in range(20_000)
    )
    figure = shapes.panel(Panel("timeline", "t", rows))
    trace = spec(figure)["data"][0]
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
        mine = [d for d in drawn if (d.lane, d.category) == (span.lane, span.category)]
        assert any(d.start <= span.start and span.start + span.dur <= d.start + d.dur for d in mine)
    assert shapes.merge(spans[:300], 300) == (spans[:300], "")


def test_arrows_lead_from_lane_to_lane_and_are_in_the_table() -> None:
    rows = tuple((f"rank {n}", 0, 10_000_000, "x", "communication") for n in range(3))
    arrows = ((6e6, "rank 1", "rank 0", "0 for 1"), (8e6, "rank 1", "rank 2", "2 for 1"), (9e6, "rank 1", "gone", "x"))
    figure = shapes.panel(Panel("timeline", "t", rows, arrows=arrows))
    _, heads = spec(figure)["data"]
    assert (heads["x"], heads["y"]) == ([6, 8], [0, 2])
    assert heads["marker"]["symbol"] == ["triangle-up", "triangle-down"]
    assert [(s["x0"], s["y0"], s["y1"]) for s in spec(figure)["layout"]["shapes"]] == [(6, 1, 0), (8, 1, 2)]
    assert [row[0] for row in figure.table.rows][-2:] == ["0 for 1", "2 for 1"]


# Where the step goes.


def test_the_stack_holds_each_rank_and_its_parts_add_up_to_the_step() -> None:
    figure = ranks.stack(results.ddp())
    traces = spec(figure)["data"]
    assert figure is not None
    drawn = ("computation", "communication", "waiting", "copy", "input_wait", "checkpoint", "host", "other")
    assert figure.legend == drawn
    assert [t["marker"]["color"] for t in traces] == [looks.DRAWN[c].light for c in drawn]
    assert [sum(t["x"][i] for t in traces) for i in range(4)] == [pytest.approx(214.6, rel=1e-4)] * 4
    assert [a["text"] for a in spec(figure)["layout"]["annotations"]] == ["◀ finding 2", "◀ finding 1"]
    # Waiting for other ranks is drawn apart from the rest of communication.
    transfer, waiting = traces[1:3]
    assert waiting["x"] == [pytest.approx(share * 214.6) for share in (0.28, 0, 0.28, 0.28)]
    assert transfer["x"] == [pytest.approx(share * 214.6) for share in (0.03, 0.04, 0.02, 0.01)]
    assert "all of it for rank 1" in waiting["hovertext"][0]
    assert figure.table.columns[1:4] == ("Computation", "Communication", "of it waiting")
    assert len({len(row) for row in figure.table.rows} | {len(figure.table.columns), len(figure.table.numeric)}) == 1
    assert ranks.stack(results.empty()) is None


def test_a_part_too_short_to_be_seen_is_in_the_table_and_not_in_the_legend() -> None:
    figure = ranks.stack(
        replace(results.ddp(), time=(*results.ddp().time, TimePart(0, "compilation", 0.1 * MS, 0.0005)))
    )
    assert figure is not None
    assert "compilation" not in figure.legend
    assert "Compilation" in figure.table.columns


@pytest.mark.parametrize("count", [16, 17, 128, 129, 1000])
def test_the_stack_stays_readable_for_any_number_of_ranks(count: int) -> None:
    figure = ranks.stack(results.many(count))
    drawn = spec(figure)
    assert figure is not None
    assert len(drawn["data"][0]["x"]) <= ranks.SINGLE_RANKS
    assert drawn["layout"]["height"] <= 1000
    assert len(drawn["layout"]["yaxis"]["tickvals"]) <= 30
    assert bool(figure.note) == (count > ranks.SINGLE_RANKS)
    if count > ranks.SINGLE_RANKS:  # the slow one still has its own bar
        assert drawn["layout"]["yaxis"]["ticktext"][0] == "rank 37"
        assert drawn["data"][0]["x"][0] == pytest.approx(0.9 * 512)


def test_the_device_table_starts_with_the_mean_and_its_parts_are_shares_of_the_span() -> None:
    table = ranks.device(results.ddp())
    assert table is not None
    assert [row[0] for row in table.rows] == ["mean", "0", "1", "2", "3"]
    assert cells(table, 2)[0][3].endswith("· 4.0 %")
    assert ranks.device(results.healthy()) is None


def test_the_rank_that_others_wait_for_is_drawn_with_what_made_it_late() -> None:
    figure = ranks.blame(results.ddp())
    drawn = spec(figure)
    assert figure is not None
    assert figure.legend == ("computation", "input_wait")
    # Three of four ranks wait: the mean is theirs, as in the sentence above it.
    assert [t["x"] for t in drawn["data"]] == [pytest.approx([share * 214.6]) for share in (0.02, 0.26)]
    assert [a["text"].replace(NBSP, " ") for a in drawn["layout"]["annotations"]] == ["3 ranks wait"]
    assert [row[0] for row in figure.table.rows] == ["rank 0", "rank 2", "rank 3"]


def test_of_hundreds_of_late_ranks_the_worst_are_drawn_and_short_waits_are_not() -> None:
    pairs = ((rank, culprit) for rank in range(256) for culprit in range(40) if rank != culprit)
    made = replace(results.many(256), blame=tuple(Blame(r, c, "host", (c + 1) * MS, 0.1) for r, c in pairs))
    figure = ranks.blame(made)
    assert spec(figure)["layout"]["yaxis"]["ticktext"] == [f"rank {c}" for c in range(39, 31, -1)]
    assert figure is not None
    assert figure.note
    assert ranks.blame(replace(made, blame=tuple(replace(b, ns=1.0) for b in made.blame))) is None
    assert ranks.blame(replace(made, blame=())) is None


# Many ranks.

RANKS, HOST, SLOW = 1_024, 8, 338


@pytest.fixture(scope="module")
def many() -> Result:
    """A run of 1,024 ranks in two stages: one computes longer, and the others of its stage wait for it."""
    time, found, blame = [], [], []
    for rank in range(RANKS):
        computes = 0.9 if rank == SLOW else 0.5 + 0.1 * (rank % 2)
        time.append(TimePart(rank, "computation", computes * 200 * MS, computes))
        time.append(TimePart(rank, "communication", (1 - computes) * 200 * MS, 1 - computes))
        slow = ("computation", 180 * MS, 100 * MS) if rank == SLOW else ()
        found.append(Member(rank, f"node-{rank // HOST + 1}", f"stage {rank % 2}", *slow))
        if rank != SLOW and rank % 2 == SLOW % 2:
            blame.append(Blame(rank, SLOW, "computation", 60 * MS, 0.3))
    return replace(
        results.ddp(), time=tuple(time), members=tuple(found), blame=tuple(blame), outcomes=(), device=(), changes=()
    )


@pytest.fixture(scope="module")
def of_many(many: Result) -> ranks.Many:
    shown = ranks.many(many)
    assert shown is not None
    return shown


def test_the_page_of_many_ranks_is_small_and_that_of_few_has_no_groups(many: Result) -> None:
    page = html.render(many)
    assert len(page.encode()) < 2_000_000
    assert f'<th scope="row">rank {SLOW}</th>' in page
    assert ranks.many(results.ddp()) is None
    assert "Groups of like ranks" in page
    assert "Groups of like ranks" not in html.render(results.ddp())


def test_groups_hold_all_ranks_but_those_that_stand_out(many: Result, of_many: ranks.Many) -> None:
    assert [row[:3] for row in of_many.groups.rows] == [("stage 0", "511", "128"), ("stage 1", "512", "128")]
    assert of_many.unlike is not None
    assert [row[:4] for row in of_many.unlike.rows] == [(f"rank {SLOW}", "node-43", "stage 0", "more computation")]
    labels = spec(ranks.stack(many))["layout"]["yaxis"]["ticktext"]
    assert labels == [f"rank {SLOW}", f"stage 0 · 511{NBSP}ranks", f"stage 1 · 512{NBSP}ranks"]


def test_the_heat_map_covers_every_rank_in_each_row_and_joins_like_ones(of_many: ranks.Many) -> None:
    drawn = spec(of_many.by_category)
    (trace,) = drawn["data"]
    for row in (0, 1):
        line = sorted((b, x) for b, x, y in zip(trace["base"], trace["x"], trace["y"], strict=True) if y == row)
        assert line[0][0] == 0
        assert all(b + x == after for (b, x), (after, _) in pairwise(line))
        assert sum(line[-1]) == drawn["layout"]["xaxis"]["range"][1]
    darkest = max(range(len(trace["x"])), key=lambda i: (trace["y"][i] == 0) * trace["marker"]["opacity"][i])
    assert f"rank {SLOW}" in trace["hovertext"][darkest]
    assert len(json.dumps(drawn)) < 20_000


def test_waits_between_many_ranks_are_shown_by_host(many: Result, of_many: ranks.Many) -> None:
    drawn = spec(of_many.by_pair)
    assert drawn["layout"]["xaxis"]["ticktext"] == ["node-43"]
    (trace,) = drawn["data"]
    # Half of each host's ranks wait 60 of 214.6 ms; of the slow one's own host, three of eight do.
    assert sum(trace["y"]) == RANKS / HOST
    assert f"14{NBSP}% of the step for node-43" in trace["hovertext"][0]
    nobody = ranks.many(replace(many, blame=()))
    assert nobody is not None
    assert nobody.by_pair is None


# Memory.


def footprint(ranks: int = 2) -> Footprint:
    """Return ranks of 20 GB and more, each rank a little more than the one before it."""

    def device(rank: int) -> DeviceMemory:
        sizes = (("parameter", 4 * GB), ("activation", (14 + rank / 100) * GB), ("cache", 2 * GB))
        kept = tuple(MemoryPart(part, of, "allocator" if part == "cache" else "counted") for part, of in sizes)
        return DeviceMemory(rank, "cuda:0", kept, "backward", 80 * GB)

    changes = (
        MemoryChange("batch", "2", 34 * GB, 2.1, 90e6, least_bytes=30 * GB, most_bytes=41 * GB),
        MemoryChange("batch", "8", 118 * GB, 0.5, 80e6),
        MemoryChange("checkpoint", "layers.*", 9 * GB, 9.3, 130e6, "most", "as if all were computed again"),
        MemoryChange("8_bit", "", 18 * GB, 4.4, None, why="how fast its kernels are is not known"),
    )
    held = (ModuleMemory("layers.*", "Layer", 12, 15 * GB, 3 * GB, activation=12 * GB),)
    return Footprint(tuple(device(rank) for rank in reversed(range(ranks))), ranks - 1, held, changes, 100e6)


def test_memory_is_a_bar_a_rank_and_of_many_ranks_the_fullest() -> None:
    shown, crowd = memory.shown(footprint()), memory.shown(footprint(200))
    assert shown is not None
    assert crowd is not None
    traces = {trace["name"]: trace for trace in spec(shown.bars)["data"]}
    assert traces["Activations"]["x"] == [14, 14.01]
    assert "tensor by tensor" in traces["Activations"]["hovertext"][0]
    assert shown.bars.legend == ("held-parameter", "held-activation", "held-cache")
    assert spec(shown.bars)["layout"]["shapes"][0]["x0"] == 80
    assert len(spec(crowd.bars)["data"][0]["x"]) == 64
    assert "136 more ranks" in crowd.bars.note
    assert memory.shown(None) is None


def test_each_change_has_its_peak_its_step_and_how_that_is_known() -> None:
    shown = memory.shown(footprint())
    assert shown is not None
    assert shown.changes is not None
    rows = {row[0]: row[1:] for row in cells(shown.changes)}
    assert (rows["2 × batch"][:2], rows["2 × batch"][3]) == (["34 GB", "30 GB to 41 GB"], "")
    assert (rows["8 × batch"][1], rows["8 × batch"][3]) == ("", "does not fit")
    assert rows["checkpointing of layers.*"][4] == "at most 130.0 ms"
    assert rows["optimizer state in 8 bits"][4:] == ["—", "how fast its kernels are is not known"]


@pytest.mark.parametrize(
    ("change", "words"),
    [(("shard", "3/8"), "FSDP (ZeRO 3) over 8 ranks"), (("later", "x"), "later x"), (("batch", "odd"), "odd × batch")],
)
def test_an_unknown_change_keeps_its_name(change: tuple[str, str], words: str) -> None:
    assert memory.described(MemoryChange(*change, 1.0)) == words


def test_memory_is_on_the_page_and_the_terminal_where_it_was_counted() -> None:
    result = replace(results.ddp(), footprint=footprint())
    page = html.render(result)
    assert 'id="memory"' in page
    assert f"layers.* ×{NBSP}12" in page
    text = " ".join(terminal.render(result, 100).split())
    assert "Peak memory (rank 1, cuda:0): 20.0 GB of 80 GB (activations 70 %, parameters 20 %" in text
    devices = (DeviceMemory(0, "cpu", (MemoryPart("process", 3 * GB, "process"), MemoryPart("input", GB, "counted"))),)
    on_cpu = memory.sentence(Footprint(devices, 0)).replace(NBSP, " ")
    assert on_cpu == "Peak host memory: 4 GB (process baseline 75 %, input 25 %)."
    assert memory.sentence(None) == ""
    assert 'id="memory"' not in html.render(results.ddp())


# Modules.


def tree_of(found: Modules) -> modules.Tree:
    tree = modules.shown(Result(RunInfo("x"), None, modules=found))
    assert tree is not None
    return tree


def test_modules_are_a_tree_and_a_table_of_the_same_rows() -> None:
    tree = tree_of(results.encoder())
    assert [(row.depth, row.name, row.times, row.parent) for row in tree.rows] == [
        (0, "Encoder", "", True),
        (1, "encoder.layer.*", "× 12", True),
        (2, "attention", "", False),
        (2, "mlp", "", False),
        (1, "head", "", False),
        (0, "communication of no single module", "", False),
        (0, "device idle", "", False),
    ]
    assert tree.rows[1].note == f"slowest encoder.layer.11: 20.0{NBSP}ms against 10.0{NBSP}ms"
    assert tree.rows[3].note == f"longest on rank 3: 69.0{NBSP}ms"
    assert [row.open for row in tree.rows[:3]] == [True, True, True]
    named = ("module", "share", "time", "forward", "backward", "own", "calls", "FLOP/s", "MFU", "params")
    assert tree.table.columns == named
    assert len(tree.table.rows) == len(tree.rows)
    assert cells(tree.table, 1)[0][1:5] == ["61 %", "130.0 ms", "43.3 ms", "86.7 ms"]
    assert cells(tree.table, -1)[0][1:4] == ["16 %", "34.6 ms", ""]
    assert "takes 400.0 µs of a traced step (0.2 %)" in tree.under.replace(NBSP, " ")


def test_the_flame_graph_of_modules_has_what_is_inside_below_what_is_around_it() -> None:
    [trace] = spec(tree_of(results.encoder()).flame)["data"]
    drawn = zip(trace["text"], trace["y"], trace["base"], trace["x"], strict=True)
    frames = {text: (y, base / MS, x / MS) for text, y, base, x in drawn}
    for text, frame in {
        "step": (0, 0, 214.6),
        "Encoder": (1, 0, 150),
        "encoder.layer.* × 12 · Layer": (2, 0, 130),
        "mlp × 12 · MLP": (3, 80, 46),
        "head · Linear": (2, 130, 18),
        "device idle": (1, 180, 34.6),
    }.items():
        assert frames[text] == pytest.approx(frame)


def test_modules_that_are_compiled_missing_or_too_many() -> None:
    compiled = (results.module("", "Net", 0, 100.0, compiled=True),)
    assert "compiled" in tree_of(replace(results.encoder(), rows=compiled)).rows[0].note
    without = tree_of(Modules(why="the trace names no module"))
    assert (without.why, modules.specs(without)) == ("the trace names no module", {})
    assert modules.shown(Result(RunInfo("x"), None)) is None
    rows = tuple(results.module(f"m{n}", "Linear", 0, 1.0) for n in range(2 * drawing.ROWS))
    tree = tree_of(replace(results.encoder(), rows=rows))
    assert len(tree.rows) == len(tree.table.rows) == drawing.ROWS
