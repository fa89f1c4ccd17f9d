"""Few bars lie and many stand; a label stays a label."""

from __future__ import annotations

from dlprof.report import looks
from dlprof.report.figures import drawing, shapes
from dlprof.result import Panel


def test_few_bars_lie_and_many_stand() -> None:
    few = shapes.panel(Panel("bars", "few", (("a", 1.5e6), ("b", 3e6, "copy")), unit="ns")).spec
    many = shapes.panel(Panel("bars", "many", tuple((f"b{i}", i) for i in range(1000)))).spec
    assert few is not None
    assert many is not None
    assert (few["data"][0]["orientation"], few["data"][0]["x"]) == ("h", [1.5, 3.0])
    assert few["layout"]["xaxis"]["ticksuffix"].strip() == "ms"
    assert few["data"][0]["marker"]["color"] == [drawing.SERIES[0], looks.LOOKS["copy"].light]
    assert many["data"][0]["orientation"] == "v"
    assert len(many["data"][0]["y"]) <= shapes.BARS
    assert max(many["data"][0]["y"]) == 999


def test_labels_that_look_like_dates_or_repeat_stay_labels() -> None:
    spec = shapes.panel(Panel("bars", "t", (("2024-01-01", 1), ("2024-01-01", 2), ("3", 4)))).spec
    assert spec is not None
    assert spec["data"][0]["y"] == [0, 1, 2]
    assert spec["layout"]["yaxis"]["ticktext"] == ["2024-01-01", "2024-01-01", "3"]
