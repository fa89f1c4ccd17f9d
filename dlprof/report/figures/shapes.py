"""A panel of a result as a figure: one way to draw for each shape.

Bar charts: a few bars are horizontal with their labels, many stand in a row.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import compress
from typing import TypeVar

from dlprof import units
from dlprof.plain import plain
from dlprof.report import formatting, looks
from dlprof.report.figures import drawing
from dlprof.report.figures.drawing import INK, SERIES, Figure, axis, drawn, layout, number, plain_table, rounded
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


BARS = 400  # upright; more would be narrower than two pixels


HORIZONTAL = 14  # so many bars at most have room for their labels


def bars(evidence: Panel) -> Figure:
    """Draw up to HORIZONTAL bars with a label and a value each, more of them upright, in the order given."""
    of = plain(evidence.unit, 24)
    rows = [(str(row[0]), number(row[1]), str(row[2]) if len(row) > 2 and row[2] else "") for row in evidence.rows]

    def written(value: float | None, unknown: str = "") -> str:
        return unknown if value is None else formatting.quantity(value, of)

    categories = formatting.ordered(c for _, _, c in rows if c)
    width = 3 if categories else 2
    cells = [(label, written(v, units.UNKNOWN), looks.look(c).name)[:width] for label, v, c in rows]
    table = plain_table(("", "value", "category")[:width], cells, (False, True, False)[:width])
    largest = max((abs(v) for _, v, _ in rows if v is not None), default=0.0)
    divisor, unit = units.scale(of, largest)
    note = ""
    if len(rows) > BARS:
        size = math.ceil(len(rows) / BARS)
        note = f"Each bar is the largest of {size} neighbours."
        rows = [max(rows[i : i + size], key=lambda row: row[1] or 0.0) for i in range(0, len(rows), size)]
    values = [None if v is None else rounded(v / divisor) for _, v, _ in rows]
    places = list(range(len(rows)))
    colours = [looks.look(c).light if c else SERIES[0] for _, _, c in rows]
    trace = drawing.bars(values, places, colours, (f"{plain(label, 90)}: {written(v)}" for label, v, _ in rows))
    value_axis = axis(unit, rangemode="tozero", nticks=5)
    if len(rows) <= HORIZONTAL:
        labels = [plain(label, 34) for label, _, _ in rows]
        trace |= {
            "text": [drawn(written(v), 40) for _, v, _ in rows],
            "textposition": "outside",
            "cliponaxis": False,
            "textfont": {"color": INK, "size": 12},
        }
        height, left = 28 * len(rows) + 36, drawing.margin(labels)
        arranged = layout(height, left, bargap=0.3, xaxis=value_axis, yaxis=drawing.lanes(labels))
        arranged["margin"]["r"] = 80
    else:
        trace |= {"orientation": "v", "x": places, "y": values}
        ticks = places[:: math.ceil(len(rows) / 8)]
        label_axis = axis(tickvals=ticks, ticktext=[drawn(rows[i][0], 14) for i in ticks], showgrid=False, tickangle=0)
        arranged = layout(190, 60, bargap=0.15, xaxis=label_axis, yaxis=value_axis)
    label = f"Bars: {plain(evidence.title, 160)}; {len(evidence.rows)} values, the largest {written(largest)}."
    return Figure(label, {"data": [trace], "layout": arranged}, table, tuple(categories), note)
