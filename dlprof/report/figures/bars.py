"""Bars: a few lie, with their labels beside them, many stand in a row."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from dlprof import units
from dlprof.plain import plain
from dlprof.report import formatting, looks
from dlprof.report.figures.drawing import (
    INK,
    SERIES,
    Figure,
    axis,
    drawn,
    layout,
    margin,
    number,
    plain_table,
    rounded,
)
from dlprof.result import Panel

BARS = 400  # upright; more would be narrower than two pixels


def bars(evidence: Panel) -> Figure:
    """Few bars lie, with their labels beside them; many stand in a row, in the order given."""
    rows = [(str(row[0]), number(row[1]), str(row[2]) if len(row) > 2 and row[2] else "") for row in evidence.rows]
    categories = formatting.ordered(c for _, _, c in rows if c)
    table = plain_table(
        ("", "value", "category") if categories else ("", "value"),
        [
            (
                label,
                units.UNKNOWN if v is None else formatting.quantity(v, plain(evidence.unit, 24)),
                *([looks.look(c).name] if categories else []),
            )
            for label, v, c in rows
        ],
    )
    table = replace(table, numeric=(False, True, False)[: len(table.columns)])
    largest = max((abs(v) for _, v, _ in rows if v is not None), default=0.0)
    divisor, unit = units.scale(plain(evidence.unit, 24), largest)
    lying = len(rows) <= 14
    note = ""
    if len(rows) > BARS:
        size = math.ceil(len(rows) / BARS)
        note = f"Each bar is the largest of {size} neighbours."
        rows = [max(rows[i : i + size], key=lambda row: row[1] or 0.0) for i in range(0, len(rows), size)]
    values = [None if v is None else rounded(v / divisor) for _, v, _ in rows]
    places = list(range(len(rows)))
    written = ["" if v is None else formatting.quantity(v, plain(evidence.unit, 24)) for _, v, _ in rows]
    trace: dict[str, Any] = {
        "type": "bar",
        "orientation": "h" if lying else "v",
        "x": values if lying else places,
        "y": places if lying else values,
        "marker": {"color": [looks.look(c).light if c else SERIES[0] for _, _, c in rows], "line": {"width": 0}},
        "hoverinfo": "text",
        "hovertext": [drawn(f"{plain(label, 90)}: {w}", 160) for (label, _, _), w in zip(rows, written, strict=True)],
    }
    value_axis = axis(unit, rangemode="tozero", nticks=5)
    if lying:
        labels = [plain(label, 34) for label, _, _ in rows]
        trace |= {
            "text": [drawn(w, 40) for w in written],
            "textposition": "outside",
            "cliponaxis": False,
            "textfont": {"color": INK, "size": 12},
        }
        label_axis = axis(autorange="reversed", tickvals=places, ticktext=[drawn(t) for t in labels], showgrid=False)
        arranged = layout(28 * len(rows) + 36, margin(labels), bargap=0.3, xaxis=value_axis, yaxis=label_axis)
        arranged["margin"]["r"] = 80
    else:
        every = math.ceil(len(rows) / 8)
        ticks = places[::every]
        label_axis = axis(tickvals=ticks, ticktext=[drawn(rows[i][0], 14) for i in ticks], showgrid=False, tickangle=0)
        arranged = layout(190, 60, bargap=0.15, xaxis=label_axis, yaxis=value_axis)
    most = formatting.quantity(largest, plain(evidence.unit, 24))
    label = f"Bars: {plain(evidence.title, 160)}; {len(evidence.rows)} values, the largest {most}."
    return Figure("", label, {"data": [trace], "layout": arranged}, table, tuple(categories), note)
