"""Lines over steps or time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dlprof import units
from dlprof.plain import plain
from dlprof.report import formatting, looks
from dlprof.report.figures.drawing import (
    LANES,
    MUTE,
    SERIES,
    Figure,
    axis,
    drawn,
    layout,
    number,
    plain_table,
    rounded,
)
from dlprof.result import Panel

POINTS = 2_000  # of one line: about two for each pixel of a wide figure
ALL_POINTS = 6_000  # of all lines of a figure: of eight lines one for each pixel
MARKS = 200

TOGETHER = 8  # lines whose figures stand in one box beside the pointer
# Of so many points and more, those this many times as high as nineteen of twenty are cut off.
FEW, PEAK = 20, 4

FEW_STEPS = 12  # have a number each

NO_LINE = {"width": 0}


def lines(evidence: Panel) -> Figure:
    """A line for each column after the first; a column named like a category has its colour."""
    return _drawn(evidence, stacked=False)


def _drawn(evidence: Panel, *, stacked: bool) -> Figure:
    names = [plain(c, 60) for c in evidence.columns[1:]]
    width = max([len(names), *(len(row) - 1 for row in evidence.rows)], default=0)
    names += [f"series {i + 1}" for i in range(len(names), width)]
    beyond = max(width - LANES, 0)
    width -= beyond
    names = names[:width]
    x_name = evidence.columns[0] if evidence.columns else ""
    numbers = [number(row[0]) if row else None for row in evidence.rows]
    named = any(n is None for n in numbers)
    xs: list[float] = [float(i) if named else n or 0.0 for i, n in enumerate(numbers)]
    columns = [[number(row[i + 1]) if len(row) > i + 1 else None for row in evidence.rows] for i in range(width)]
    given = plain(evidence.unit, 24)
    points = [[column[k] or 0.0 for column in columns] for k in range(len(xs))]
    heights = [sum(values) for values in points] if stacked else [max(values, default=0.0) for values in points]
    largest, cut = _top(heights) if given == "ns" else (max(map(abs, heights), default=0.0), "")
    divisor, unit = units.scale(given, largest)
    over_time = x_name == "time_ns"
    # What stands on the same axis has the same unit, however short it is.
    x_divisor, x_unit = (
        (1e9, "s") if over_time else units.scale(formatting.suffix(x_name), max((abs(x) for x in xs), default=0.0))
    )
    room = min(POINTS, max(200, ALL_POINTS // max(width, 1)))
    data: list[dict[str, Any]] = []
    thinned = False
    for i, (name, column) in enumerate(zip(names, columns, strict=True)):
        keep = downsample(column, room)
        thinned = thinned or len(keep) < len(column)
        known = evidence.columns[i + 1] in looks.DRAWN if i + 1 < len(evidence.columns) else False
        data.append(
            {
                "type": "scatter",
                "mode": "lines" if len(keep) > 40 else "lines+markers",
                "name": drawn(looks.look(name).name if known else name, 40),
                "x": [rounded(xs[k] / x_divisor) for k in keep],
                "y": [rounded(v / divisor, 4) if (v := column[k]) is not None else None for k in keep],
                "line": {
                    "color": looks.look(name).light if known else SERIES[i % len(SERIES)],
                    "width": 1.6 if width <= 6 else 1,
                    "dash": "solid" if known else ("solid", "dot", "dash")[i // len(SERIES) % 3],
                },
                "marker": {"size": 5},
            }
        )
        # One line tells the step for all that stand at the same place.
        if evidence.steps and (i == 0 or width > TOGETHER):
            data[-1]["customdata"] = [evidence.steps[k] for k in keep]
            data[-1]["hovertemplate"] = "%{y} · step %{customdata}"
    x_axis = axis(x_unit, showgrid=False, fixedrange=False, nticks=10)
    x_axis["title"] = {"text": drawn(formatting.header(x_name), 80), "standoff": 6, "font": {"size": 12, "color": MUTE}}
    if not over_time and not x_unit and 0 < len(xs) <= FEW_STEPS:
        x_axis["tickvals"] = [rounded(x) for x in xs]  # there is no step 1.5
    if named and evidence.rows:
        ticks = list(range(0, len(xs), math.ceil(len(xs) / 8)))
        x_axis |= {"tickvals": ticks, "ticktext": [drawn(evidence.rows[k][0], 14) for k in ticks]}
    arranged = layout(
        260,
        64,
        xaxis=x_axis,
        yaxis=axis(unit, rangemode="tozero", nticks=6),
        hovermode="x unified" if width <= TOGETHER else "closest",
        dragmode="zoom",
    )
    arranged["margin"]["b"] = 46
    if cut:
        arranged["yaxis"]["range"] = [0, rounded(largest / divisor)]
    if 1 < width <= 12:
        arranged |= {
            "showlegend": True,
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "font": {"color": MUTE}},
        }
        arranged["margin"]["t"] = 34
    if over_time:
        arranged["meta"] = {"axis": "time"}
    marks = [mark for mark in evidence.marks if number(mark[0]) is not None][:MARKS]
    data += _marks(marks, x_divisor, (0.96 if cut else 1.06) * largest / divisor)
    arranged["shapes"] = [_upright(mark, x_divisor) for mark in marks]
    rows = []
    for name, column in zip(names, columns, strict=True):
        known_values = [v for v in column if v is not None]
        if known_values:
            mean = sum(known_values) / len(known_values)
            figures = [formatting.quantity(v, given) for v in (min(known_values), mean, max(known_values))]
            rows.append((name, f"{len(known_values):,}", *figures))
        else:
            rows.append((name, "0", units.UNKNOWN, units.UNKNOWN, units.UNKNOWN))
    rows += [(label, *[""] * 4) for _, label, _ in marks]
    table = plain_table(("line", "points", "least", "mean", "most"), rows)
    table = replace(table, numeric=(False, True, True, True, True))
    label = (
        f"Lines: {plain(evidence.title, 160)}; {formatting.counted(width, 'line')} over {len(evidence.rows):,} points."
    )
    note = "Thinned to what a screen can show: the least and the most of each stretch are kept." if thinned else ""
    note += f" {cut}" if cut else ""
    note += f" {beyond:,} more lines are in result.json." if beyond else ""
    return Figure(
        "",
        label,
        {"data": data, "layout": arranged},
        table,
        tuple(formatting.ordered(mark[2] for mark in marks)),
        note.strip(),
    )


def areas(evidence: Panel) -> Figure:
    """Lines stacked upon each other, filled in the colours of their categories."""
    figure = _drawn(evidence, stacked=True)
    spec: dict[str, Any] = figure.spec or {"data": [], "layout": {"margin": {}}}
    data = [
        trace | {"mode": "lines", "stackgroup": "parts", "fillcolor": trace["line"]["color"], "line": NO_LINE}
        for trace in spec["data"]
    ]
    arranged = spec["layout"] | {"showlegend": False}
    arranged["margin"] = arranged["margin"] | {"t": 8}
    return replace(
        figure,
        spec={"data": data, "layout": arranged},
        label=figure.label.replace("Lines:", "Stacked areas:", 1),
        legend=tuple(formatting.ordered(c for c in evidence.columns[1:])),
    )


def _marks(marks: Sequence[tuple[float, str, str]], divisor: float, height: float) -> list[dict[str, Any]]:
    """Return a row of marks a category, above the lines."""
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": drawn(looks.look(category).name, 40),
            "showlegend": False,
            "x": [rounded(at / divisor) for at, _, of in marks if of == category],
            "y": [rounded(height) for _, _, of in marks if of == category],
            "marker": {"symbol": "triangle-down", "size": 10, "color": looks.look(category).light},
            "hoverinfo": "text",
            "hovertext": [drawn(label) for _, label, of in marks if of == category],
        }
        for category in formatting.ordered(mark[2] for mark in marks)
    ]


def _top(heights: Sequence[float]) -> tuple[float, str]:
    """Return how high a figure of lengths of time reaches, and a note where peaks are cut off.

    A first step that is many times as long as all others would press these against the axis.
    """
    ordered = sorted(heights)
    largest = ordered[-1] if ordered else 0.0
    usual = ordered[len(ordered) * 19 // 20] if len(ordered) >= FEW else largest
    if largest <= PEAK * usual or usual <= 0:
        return largest, ""
    top = 2 * usual
    higher = sum(h > top for h in ordered)
    return top, (
        f"The axis ends at {formatting.duration(top)}: {formatting.counted(higher, 'point')} above it,"
        f" the highest {formatting.duration(largest)}."
    )


def _upright(mark: tuple[float, str, str], divisor: float) -> dict[str, Any]:
    x = rounded(mark[0] / divisor)
    line = {"color": looks.look(mark[2]).light, "width": 1, "dash": "dot"}
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "layer": "below", "line": line}


def downsample(values: Sequence[float | None], room: int) -> list[int]:
    """Return the places to keep, at most `room`: of each stretch the least and the most, of each gap the first."""
    n = len(values)
    if n <= room:
        return list(range(n))
    stretches = max(room // 2 - 1, 1)
    keep = {0, n - 1}
    for s in range(stretches):
        stretch = range(n * s // stretches, n * (s + 1) // stretches)
        known = [i for i in stretch if values[i] is not None]
        if known:
            keep.add(min(known, key=lambda i: values[i] or 0.0))
            keep.add(max(known, key=lambda i: values[i] or 0.0))
        if len(known) < len(stretch) and not known:
            keep.add(stretch[0])
    return sorted(keep)
