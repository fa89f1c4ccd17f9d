"""A panel of a result as a figure: one way to draw for each shape."""

from __future__ import annotations

from dataclasses import replace

from dlprof.renderers import words
from dlprof.renderers.bars import bars
from dlprof.renderers.drawing import Figure, plain_table
from dlprof.renderers.flame import flame
from dlprof.renderers.lines import areas, lines
from dlprof.renderers.timeline import timeline
from dlprof.result import Panel


def panel(evidence: Panel) -> Figure:
    """Give the figure of a panel of any shape."""
    draw = {
        "table": _table,
        "bars": bars,
        "lines": lines,
        "areas": areas,
        "timeline": timeline,
        "flame": flame,
    }[evidence.shape]
    drawn = draw(evidence)
    note = " ".join(n for n in (words.plain(evidence.note, 600), drawn.note) if n)
    return replace(drawn, title=words.plain(evidence.title, 200), note=note)


def _table(evidence: Panel) -> Figure:
    return Figure("", "", None, plain_table(evidence.columns, evidence.rows))
