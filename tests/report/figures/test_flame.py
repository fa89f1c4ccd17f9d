"""A flame graph stands each frame under its caller."""

from __future__ import annotations

from dlprof.report.figures import shapes
from dlprof.result import Panel


def test_a_flame_graph_stands_callers_above_what_they_call() -> None:
    rows = ((0, 0, 10, "rest", "host"), (1, 0, 7, "f", "own"), (2, 0, 3, "g", "library"), (1, 7, 2, "g", "library"))
    figure = shapes.panel(Panel("flame", "t", rows, unit="samples"))
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
