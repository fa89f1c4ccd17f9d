"""A panel of a result as a figure: one way to draw for each shape."""

from __future__ import annotations

from dataclasses import replace
from itertools import compress
from typing import TypeVar

from dlprof.plain import plain
from dlprof.report.figures.bars import bars
from dlprof.report.figures.drawing import Figure, plain_table
from dlprof.report.figures.flame import flame
from dlprof.report.figures.lines import areas, lines
from dlprof.report.figures.timeline import timeline
from dlprof.result import Panel
from dlprof.units import UNKNOWN

T = TypeVar("T")


def panel(evidence: Panel) -> Figure:
    """Return the figure of a panel of any shape."""
    shapes = {"table": _table, "bars": bars, "lines": lines, "areas": areas, "timeline": timeline, "flame": flame}
    drawn = shapes[evidence.shape](evidence)
    note = " ".join(n for n in (plain(evidence.note, 600), drawn.note) if n)
    return replace(drawn, title=plain(evidence.title, 200), note=note)


def _table(evidence: Panel) -> Figure:
    """Return a table without the columns in which every value is unknown, and a note that names these."""
    table = plain_table(evidence.columns, evidence.rows)
    known = [not i or {row[i] for row in table.rows if row[i]} != {UNKNOWN} for i in range(len(table.columns))]
    lacking = [name for name, of in zip(table.columns, known, strict=True) if not of]

    def kept(cells: tuple[T, ...]) -> tuple[T, ...]:
        return tuple(compress(cells, known))

    rows = tuple(kept(row) for row in table.rows)
    shares = tuple(kept(row) for row in table.shares)
    table = replace(table, columns=kept(table.columns), rows=rows, numeric=kept(table.numeric), shares=shares)
    return Figure("", None, table, note=f"Unknown for this run: {', '.join(lacking)}." if lacking else "")
