"""Lines over steps or time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dlprof import units
from dlprof.plain import plain
from dlprof.report import formatting, looks
from dlprof.report.figures import drawing
from dlprof.report.figures.drawing import LANES, MUTE, SERIES, Figure, axis, drawn, number, rounded
from dlprof.result import Panel

POINTS = 2_000  # of one line: about two for each pixel of a wide figure
ALL_POINTS = 6_000  # of all lines of a figure: with eight lines one for each pixel
MARKS = 200

TOGETHER = 8  # lines whose values fit into one box at the pointer
# With at least FEW points, those PEAK times as high as the 95th percentile are cut off.
FEW, PEAK = 20, 4

FEW_STEPS = 12  # have a tick each


def lines(evidence: Panel) -> Figure:
    """Draw a line for each column after the first; a column with a category's name has its colour."""
    return _drawn(evidence, stacked=False)


def _drawn(evidence: Panel, *, stacked: bool) -> Figure:
    names = list(evidence.columns[1:])
    width = max([len(names), *(len(row) - 1 for row in evidence.rows)], default=0)
    names += [f"series {i + 1}" for i in range(len(names), width)]
    names = names[:LANES]
    x_name = evidence.columns[0] if evidence.columns else ""
    numbers = [number(row[0]) if row else None for row in evidence.rows]
    named = None in numbers
    xs: list[float] = [float(i) if named else n or 0.0 for i, n in enumerate(numbers)]
    columns = [[number(row[i]) if len(row) > i else None for row in evidence.rows] for i in range(1, len(names) + 1)]
    given = plain(evidence.unit, 24)
    points = [[column[k] or 0.0 for column in columns] for k in range(len(xs))]
    heights = [sum(values) if stacked else max(values, default=0.0) for values in points]
    largest, cut = _top(heights) if given == "ns" else (max(map(abs, heights), default=0.0), "")
    divisor, unit = units.scale(given, largest)
    over_time = x_name == "time_ns"
    # Figures on the same axis have the same unit, however short the time.
    x_largest = max((abs(x) for x in xs), default=0.0)
    x_divisor, x_unit = (1e9, "s") if over_time else units.scale(formatting.suffix(x_name), x_largest)
    most = min(POINTS, max(200, ALL_POINTS // max(len(names), 1)))
    data: list[dict[str, Any]] = []
    rows: list[tuple[str, ...]] = []
    thinned = False
    for i, (name, column) in enumerate(zip(names, columns, strict=True)):
        keep = downsample(column, most)
        thinned = thinned or len(keep) < len(column)
        known = name in looks.DRAWN
        data.append(
            {
                "type": "scatter",
                "mode": "lines" if len(keep) > 40 else "lines+markers",
                "name": drawn(looks.look(name).name if known else name, 40),
                "x": [rounded(xs[k] / x_divisor) for k in keep],
                "y": [rounded(v / divisor, 4) if (v := column[k]) is not None else None for k in keep],
                "line": {
                    "color": looks.look(name).light if known else SERIES[i % len(SERIES)],
                    "width": 1.6 if len(names) <= 6 else 1,
                    "dash": "solid" if known else ("solid", "dot", "dash")[i // len(SERIES) % 3],
                },
                "marker": {"size": 5},
            }
        )
        # The first line shows the step for all lines at the same place.
        if evidence.steps and (i == 0 or len(names) > TOGETHER):
            data[-1]["customdata"] = [evidence.steps[k] for k in keep]
            data[-1]["hovertemplate"] = "%{y} · step %{customdata}"
        values = [v for v in column if v is not None]
        spread = (min(values), sum(values) / len(values), max(values)) if values else ()
        figures = [formatting.quantity(v, given) for v in spread] or [units.UNKNOWN] * 3
        rows.append((plain(name, 60), f"{len(values):,}", *figures))
    x_axis = axis(x_unit, showgrid=False, fixedrange=False, nticks=10)
    x_axis["title"] = {"text": drawn(formatting.header(x_name), 80), "standoff": 6, "font": {"size": 12, "color": MUTE}}
    if not over_time and not x_unit and 0 < len(xs) <= FEW_STEPS:
        x_axis["tickvals"] = [rounded(x) for x in xs]  # there is no step 1.5
    if named and evidence.rows:
        ticks = list(range(0, len(xs), math.ceil(len(xs) / 8)))
        x_axis |= {"tickvals": ticks, "ticktext": [drawn(evidence.rows[k][0], 14) for k in ticks]}
    arranged = drawing.layout(
        260,
        64,
        xaxis=x_axis,
        yaxis=axis(unit, rangemode="tozero", nticks=6),
        hovermode="x unified" if len(names) <= TOGETHER else "closest",
        dragmode="zoom",
    )
    arranged["margin"]["b"] = 46
    if cut:
        arranged["yaxis"]["range"] = [0, rounded(largest / divisor)]
    if 1 < len(names) <= 12:
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
    rows += [(label, *[""] * 4) for _, label, _ in marks]
    table = drawing.plain_table(("line", "points", "least", "mean", "most"), rows, (False, True, True, True, True))
    drawn_lines = f"{formatting.counted(len(names), 'line')} over {len(evidence.rows):,} points"
    notes = (
        "Thinned to what a screen can show: the least and the most of each stretch are kept." if thinned else "",
        cut,
        drawing.more(width - LANES, "lines"),
    )
    return Figure(
        f"Lines: {plain(evidence.title, 160)}; {drawn_lines}.",
        {"data": data, "layout": arranged},
        table,
        tuple(formatting.ordered(mark[2] for mark in marks)),
        " ".join(filter(None, notes)),
    )


def areas(evidence: Panel) -> Figure:
    """Draw stacked areas, filled in the colours of their categories."""
    figure = _drawn(evidence, stacked=True)
    assert figure.spec is not None
    for trace in figure.spec["data"]:
        if "line" in trace:  # and no mark
            trace |= {"mode": "lines", "stackgroup": "parts", "fillcolor": trace["line"]["color"], "line": {"width": 0}}
    label = figure.label.replace("Lines:", "Stacked areas:", 1)
    if not any(name in looks.DRAWN for name in evidence.columns[1:]):
        return replace(figure, label=label)
    figure.spec["layout"]["showlegend"] = False
    figure.spec["layout"]["margin"]["t"] = 8
    return replace(figure, label=label, legend=tuple(formatting.ordered(evidence.columns[1:])))


def _marks(marks: Sequence[tuple[float, str, str]], divisor: float, height: float) -> list[dict[str, Any]]:
    """Return a trace of marks per category, above the lines."""
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
    """Return where the y axis of durations ends, and a note where peaks are cut off.

    A first step that is many times as long as all others would flatten these.
    """
    ordered = sorted(heights)
    largest = ordered[-1] if ordered else 0.0
    usual = ordered[len(ordered) * 19 // 20] if len(ordered) >= FEW else largest
    if largest <= PEAK * usual or usual <= 0:
        return largest, ""
    top = 2 * usual
    higher = sum(h > top for h in ordered)
    above = f"{formatting.counted(higher, 'point')} above it, the highest {formatting.duration(largest)}"
    return top, f"The axis ends at {formatting.duration(top)}: {above}."


def _upright(mark: tuple[float, str, str], divisor: float) -> dict[str, Any]:
    x = rounded(mark[0] / divisor)
    line = {"color": looks.look(mark[2]).light, "width": 1, "dash": "dot"}
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "layer": "below", "line": line}


def downsample(values: Sequence[float | None], most: int) -> list[int]:
    """Return at most `most` indices to keep: of each stretch the least and the most, of each gap the first."""
    n = len(values)
    if n <= most:
        return list(range(n))
    stretches = max(most // 2 - 1, 1)
    keep = {0, n - 1}
    for s in range(stretches):
        stretch = range(n * s // stretches, n * (s + 1) // stretches)
        known = [i for i in stretch if values[i] is not None]
        if known:
            keep.add(min(known, key=lambda i: values[i] or 0.0))
            keep.add(max(known, key=lambda i: values[i] or 0.0))
        elif stretch:
            keep.add(stretch[0])
    return sorted(keep)
