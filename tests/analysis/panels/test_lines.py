"""A panel a function whose lines were timed."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis.host.stacks import line_times
from dlprof.analysis.panel import drawn
from dlprof.analysis.panels.host import LINES_PICTURE
from dlprof.errors import NotMeasured
from tests.fixtures.hosts import piece, with_lines
from tests.fixtures.runs import CPU, MS, light, measured, recorded


def test_ranks_add_up_to_a_panel_a_function_the_longest_first(tmp_path: Path) -> None:
    source = {"source": "def f():\n    a()\n"}
    first = [piece("data:f", [(2, 4, 3 * MS)], **source), piece("data:g", [(2, 1, 90 * MS)], role="worker")]
    second = [piece("data:f", [(2, 6, 7 * MS)], **source)]
    (g, f) = drawn(measured(with_lines(tmp_path, first, second), LINES_PICTURE.draw), [LINES_PICTURE])
    assert (g.title, f.title) == ("Line by line: data:g, in the loader's workers", "Line by line: data:f, in the rank")
    nbsp = "\u00a0"
    assert f.rows == (
        (1, "", "", "", "", "def f():"),
        (2, 10, 10 * MS, MS, 1, f"{nbsp * 4}a()"),
    )
    assert "over 2 ranks" in f.note


def test_a_run_without_lines_has_no_panel(tmp_path: Path) -> None:
    steps = [light(n, 10 * MS) for n in range(5)]
    made = measured(recorded(tmp_path, (None, steps, CPU)), LINES_PICTURE.draw)
    assert drawn(made, [LINES_PICTURE]) == ()
    with pytest.raises(NotMeasured, match="--lines"):
        made.frame(line_times)
