"""A panel of a result as a figure: one way to draw for each shape."""

from __future__ import annotations

from dataclasses import replace
from itertools import compress
from typing import TypeVar

from dlprof.plain import plain
from dlprof.report.figures.bars import bars
from dlprof.report.figures.drawing import Figure, Table, plain_table
from dlprof.report.figures.flame import flame
from dlprof.report.figures.lines import areas, lines
from dlprof.report.figures.timeline import timeline
from dlprof.result import Panel
from dlprof.units import UNKNOWN

T = TypeVar("T")


def panel(evidence: Panel) -> Figure:
    """Return the figure of a panel of any shape."""
    draw = {
        "table": _table,
        "bars": bars,
        "lines": lines,
        "areas": areas,
        "timeline": timeline,
        "flame": flame,
    }[evidence.shape]
    drawn = draw(evidence)
    note = " ".join(n for n in (plain(evidence.note, 600), drawn.note) if n)
    return replace(drawn, title=plain(evidence.title, 200), note=note)


def _table(evidence: Panel) -> Figure:
    return _known(plain_table(evidence.columns, evidence.rows))


def _known(table: Table) -> Figure:
    """Leave out the columns in which nothing is known, and say which."""
    told = [not i or {row[i] for row in table.rows if row[i]} != {UNKNOWN} for i in range(len(table.columns))]
    lacking = [name for name, known in zip(table.columns, told, strict=True) if not known]

    def kept(cells: tuple[T, ...]) -> tuple[T, ...]:
        return tuple(compress(cells, told))

    known = replace(
        table,
        columns=kept(table.columns),
        rows=tuple(kept(row) for row in table.rows),
        numeric=kept(table.numeric),
    )
    return Figure("", "", None, known, note=f"Not known here: {', '.join(lacking)}." if lacking else "")
