"""Lines keep their spikes and their gaps; areas are stacked; marks tell what they point at."""

from __future__ import annotations

import math

from dlprof.plain import NBSP
from dlprof.report import looks
from dlprof.report.figures import shapes
from dlprof.result import Panel


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


def test_lines_keep_to_the_points_of_a_screen_and_say_so() -> None:
    panel = Panel("lines", "t", tuple((i, math.sin(i), -i) for i in range(30_000)), ("step", "a", "input_wait"), "ns")
    figure = shapes.panel(panel)
    assert figure.spec is not None
    a, wait = figure.spec["data"]
    assert max(len(a["x"]), len(wait["x"])) <= shapes.POINTS
    assert "Thinned" in figure.note
    assert wait["line"]["color"] == looks.LOOKS["input_wait"].light
    assert a["line"]["color"] not in {look.light for look in looks.LOOKS.values()}
    assert [row[1] for row in figure.table.rows] == ["30,000", "30,000"]


def test_what_is_no_number_is_a_gap() -> None:
    figure = shapes.panel(Panel("lines", "t", ((0, 1.0), (1, math.nan), (2, None), (3, math.inf)), ("x", "y")))
    assert figure.spec is not None
    assert figure.spec["data"][0]["y"] == [1.0, None, None, None]


def test_areas_are_stacked_in_the_colours_of_their_categories() -> None:
    rows = ((0, 1e6, 2e6), (1e9, 3e6, 4e6))
    figure = shapes.panel(Panel("areas", "t", rows, ("time_ns", "input_wait", "backward"), "ns"))
    assert figure.spec is not None
    assert [t["fillcolor"] for t in figure.spec["data"]] == [looks.DRAWN[c].light for c in ("input_wait", "backward")]
    assert [t["y"] for t in figure.spec["data"]] == [[1.0, 3.0], [2.0, 4.0]]
    assert figure.spec["data"][0]["x"] == [0, 1]  # seconds, like all that stands on the run's time


def test_marks_stand_above_the_lines_with_their_words() -> None:
    marks = ((1e9, "step 1: <b>", "checkpoint"), (2e9, "step 2", "epoch"), (math.nan, "never", "epoch"))
    panel = Panel("lines", "t", ((0, 1e6), (3e9, 3e6)), ("time_ns", "rank 0"), "ns", marks=marks)
    figure = shapes.panel(panel)
    assert figure.spec is not None
    line, *marked = figure.spec["data"]
    assert [(t["x"], t["hovertext"]) for t in marked] == [([1], ["step 1: &lt;b&gt;"]), ([2], ["step 2"])]
    assert all(t["y"][0] > max(line["y"]) for t in marked)
    assert figure.legend == ("checkpoint", "epoch")
    assert [row[0] for row in figure.table.rows] == ["rank 0", "step 1: <b>", "step 2"]


def test_a_first_step_that_dwarfs_all_others_is_cut_off_and_told() -> None:
    rows = tuple((n * 1e9, 9e9 if n == 0 else (2e7 if n == 30 else 1e7)) for n in range(60))
    panel = Panel("lines", "t", rows, ("time_ns", "rank 0"), "ns", marks=((0.0, "step 0", "epoch"),))
    figure = shapes.panel(panel)
    assert figure.spec is not None
    line, mark = figure.spec["data"]
    top = figure.spec["layout"]["yaxis"]["range"][1]
    assert figure.spec["layout"]["yaxis"]["range"] == [0, 20]  # ms
    assert line["y"][0] == 9000
    assert mark["y"][0] < top
    assert figure.note.replace(NBSP, " ") == "The axis ends at 20.0 ms: 1 point above it, the highest 9.00 s."
    assert figure.table.rows[0][-1].replace(NBSP, " ") == "9.00 s"


def test_peaks_that_a_figure_has_room_for_and_other_units_are_not_cut() -> None:
    rows = tuple((n * 1e9, 3e7 if n == 0 else 1e7) for n in range(60))
    for unit, values in (("ns", rows), ("bytes", tuple((x, y * (1000 if not x else 1)) for x, y in rows))):
        figure = shapes.panel(Panel("lines", "t", values, ("time_ns", "rank 0"), unit))
        assert figure.spec is not None
        assert "range" not in figure.spec["layout"]["yaxis"]
        assert figure.note == ""


def test_areas_are_as_high_as_all_of_their_parts_together() -> None:
    rows = (*((n * 1e9, 1e7, 1e7) for n in range(59)), (59e9, 1e8, 1e9))
    figure = shapes.panel(Panel("areas", "t", rows, ("time_ns", "forward", "backward"), "ns"))
    assert figure.spec is not None
    assert figure.spec["layout"]["yaxis"]["range"] == [0, 40]


def test_the_pointer_tells_the_step_of_a_point_once() -> None:
    rows = tuple((n * 1e9, 1e6, 2e6) for n in range(5))
    panel = Panel("lines", "t", rows, ("time_ns", "rank 0", "rank 1"), "ns", steps=(7, 8, 9, 10, 12))
    figure = shapes.panel(panel)
    assert figure.spec is not None
    first, second = figure.spec["data"]
    assert first["customdata"] == [7, 8, 9, 10, 12]
    assert "step %{customdata}" in first["hovertemplate"]
    assert "customdata" not in second
