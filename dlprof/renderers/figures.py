"""The result's figures as plotly specifications: plain data in light colours, no more of it than a screen can show.

plotly reads markup, links and templates in the texts that it draws: every text passes `_drawn`, and no text of a run
becomes part of a template. Axes are numeric, with their labels as tick texts, so that no label is taken for a date.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from dlprof import units
from dlprof.renderers import words
from dlprof.result import Outcome, Panel, Result, TimePart

POINTS = 2_000  # of one line: about two for each pixel of a wide figure
ALL_POINTS = 12_000  # of all lines of a figure
SPANS = 3_000  # drawn one by one in a timeline; a browser draws so many in a fifth of a second
LANES = 64  # of a timeline, and lines of a figure
BARS = 400  # upright; more would be narrower than two pixels
ROWS = 50  # of a table
MARKED = 4  # ranks of one finding are pointed at; more would hide each other
LABELLED_RANKS = 16  # have a bar with a label each
SINGLE_RANKS = 128  # have a bar each; beyond, neighbours share one

INK, MUTE, LINE, CARD, HOT = "#1d1f24", "#5d626d", "#e6e3dd", "#ffffff", "#a32a6f"
ON_DARK, ON_LIGHT = "#fffffe", "#16181c"  # text inside bars; the same in both themes
# Lines that stand for no category have colours that no category has.
SERIES = ("#33415c", "#b5651d", "#5f8f8b", "#8d7aa8", "#7d8597", "#6b705c")

# What each light colour becomes on a dark page. Categories have theirs in `words`.
DARK: Mapping[str, str] = {
    INK: "#eceef2",
    MUTE: "#a3a9b5",
    LINE: "#2f343d",
    CARD: "#1d2026",
    HOT: "#ec86bd",
    "#33415c": "#c3cbdc",
    "#b5651d": "#e39a57",
    "#5f8f8b": "#86bab5",
    "#8d7aa8": "#b8a5d6",
    "#7d8597": "#8f98aa",
    "#6b705c": "#a5ab90",
    **{c.light: c.dark for c in words.DRAWN.values() if c.light != c.dark},
}

FONT = 'Inter, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'


@dataclass(frozen=True)
class Table:
    """Headings and rows of written cells; `numeric` says which columns are set flush right."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[bool, ...]
    note: str = ""


@dataclass(frozen=True)
class Figure:
    """One figure: what plotly draws (None for a mere table), what it shows in words, and the same as a table."""

    title: str
    label: str
    spec: dict[str, Any] | None
    table: Table
    legend: tuple[str, ...] = ()
    note: str = ""


def panel(evidence: Panel) -> Figure:
    """Give the figure of a panel of any shape."""
    drawn = {"table": _table, "bars": _bars, "lines": _lines, "timeline": _timeline}[evidence.shape](evidence)
    note = " ".join(n for n in (words.plain(evidence.note, 600), drawn.note) if n)
    return replace(drawn, title=words.plain(evidence.title, 200), note=note)


def _drawn(text: object, limit: int = 120) -> str:
    """Text for plotly to draw as it is."""
    return escape(words.plain(text, limit), quote=False)


def _number(value: Any) -> float | None:
    """A finite number, or nothing."""
    if isinstance(value, (int, float)) and math.isfinite(value):
        return float(value)
    return None


def _round(value: float | None) -> float | None:
    """Six digits place a point more exactly than a screen can."""
    return None if value is None else float(f"{value:.6g}")


def _layout(height: int, left: int, **more: Any) -> dict[str, Any]:
    return {
        "height": height,
        "margin": {"l": left, "r": 20, "t": 8, "b": 28},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 12, "color": MUTE},
        "showlegend": False,
        "hoverlabel": {"bgcolor": CARD, "bordercolor": LINE, "font": {"family": FONT, "size": 12, "color": INK}},
        "separators": ".,",
        **more,
    }


def _axis(unit: str = "", **more: Any) -> dict[str, Any]:
    """An axis that lies still; each of its numbers carries the unit."""
    return {
        "ticksuffix": words.NBSP + _drawn(unit, 24) if unit else "",
        "gridcolor": LINE,
        "zeroline": False,
        "fixedrange": True,
        "ticks": "outside",
        "ticklen": 5,
        "tickcolor": "rgba(0,0,0,0)",
        "tickfont": {"size": 11.5, "color": MUTE},
        **more,
    }


def _margin(labels: Iterable[str]) -> int:
    """Pixels that the longest label needs, from the mean width of a letter at this size."""
    longest = max((len(label) for label in labels), default=0)
    return min(max(16 + round(6.6 * longest), 48), 230)


def inside(colour: str) -> str:
    """Give the colour of text, light or dark, that stands out better on a background (WCAG relative luminance)."""

    def linear(hexadecimal: str) -> float:
        value = int(hexadecimal, 16) / 255
        return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4

    luminance = 0.2126 * linear(colour[1:3]) + 0.7152 * linear(colour[3:5]) + 0.0722 * linear(colour[5:7])
    # Equal contrast against white and against black lies at 0.18.
    return ON_LIGHT if luminance > 0.18 else ON_DARK


# Where the step goes ----------------------------------------------------------------------------------------------


def stack(result: Result) -> Figure | None:
    """Give the parts of the mean step as one stacked bar a rank, or None where nothing divided the step.

    Up to LABELLED_RANKS bars carry label and percentages; beyond, they are thin; beyond SINGLE_RANKS neighbouring ranks
    share one (their mean), and the most unlike ranks are drawn by themselves above.
    """
    parts = words.by_rank(result.time)
    if not parts:
        return None
    categories = words.ordered(p for of_rank in parts.values() for p in of_rank)
    bars, note = _stack_bars(result, parts)
    waits = {f"rank {rank}": of_rank for rank, of_rank in words.waits_for(result).items()}
    largest = max(sum(max(ns, 0.0) for ns in bar.values()) for _, bar in bars)
    divisor, unit = units.scale("ns", largest)
    roomy = len(bars) <= LABELLED_RANKS
    height = (30 if roomy else 9 if len(bars) <= 72 else 6) * len(bars) + 36
    each = words.unit(result)
    data = []
    for category in categories:
        drawn = words.look(category)
        values = [max(bar.get(category, 0.0), 0.0) for _, bar in bars]
        totals = [sum(max(v, 0.0) for v in bar.values()) or 1.0 for _, bar in bars]
        trace: dict[str, Any] = {
            "type": "bar",
            "orientation": "h",
            "name": _drawn(drawn.name),
            "y": list(range(len(bars))),
            "x": [_round(v / divisor) for v in values],
            "marker": {"color": drawn.light, "line": {"color": CARD, "width": 1 if roomy else 0}},
            "hoverinfo": "text",
            "hovertext": [
                _drawn(
                    f"{label} · {drawn.name}: {words.duration(v)}, {words.percent(v / total)} of the {each}"
                    + (_waiting(waits.get(label, {})) if category == "communication" else "")
                )
                for (label, _), v, total in zip(bars, values, totals, strict=True)
            ],
        }
        if roomy:
            trace |= {
                "text": [words.about(v / t) if v / t >= 0.06 else "" for v, t in zip(values, totals, strict=True)],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "textangle": 0,
                "insidetextfont": {"size": 11.5, "color": inside(drawn.light), "family": FONT},
            }
        data.append(trace)
    every = 1 if roomy else max(1, math.ceil(len(bars) / 16))
    ticks = [i for i in range(len(bars)) if i % every == 0 or (not roomy and bars[i][0].startswith("rank") and note)]
    labels = [bars[i][0] for i in ticks]
    layout = _layout(
        height,
        _margin(labels),
        barmode="stack",
        bargap=0.28 if roomy else 0.08,
        xaxis=_axis(unit, range=[0, _round(largest / divisor)], nticks=8),
        yaxis=_axis(autorange="reversed", tickvals=ticks, ticktext=[_drawn(t, 24) for t in labels], showgrid=False),
        annotations=_marks(result.found, bars, divisor),
    )
    if layout["annotations"]:
        layout["margin"]["r"] = 92 if roomy else 142
    shown = ", ".join(
        f"{words.look(c).name} {words.about(s)}" for c, s in list(words.mean_shares(result.time).items())[:4]
    )
    label = (
        f"Stacked bars of the parts of the mean {each}, {words.counted(len(bars), 'bar')}. Mean over ranks: {shown}."
    )
    return Figure(
        "",
        words.plain(label, 400),
        {"data": data, "layout": layout},
        _stack_table(parts, categories),
        tuple(categories),
        note,
    )


def _waiting(waits: Mapping[int, float]) -> str:
    """Say how much of a rank's communication is waiting, and for whom most."""
    if not waits:
        return ""
    culprit = next(iter(waits))
    most = f", most of it for rank {culprit}" if culprit >= 0 and len(waits) > 1 else ""
    most = f" for rank {culprit}" if culprit >= 0 and len(waits) == 1 else most
    return f" ({words.duration(sum(waits.values()))} of it waiting{most})"


def _stack_bars(
    result: Result, parts: Mapping[int, Mapping[str, TimePart]]
) -> tuple[list[tuple[str, Mapping[str, float]]], str]:
    """What each bar is called and holds in ns, and a note where ranks share bars."""
    single = {rank: {c: p.ns for c, p in of_rank.items()} for rank, of_rank in parts.items()}
    if len(parts) <= SINGLE_RANKS:
        return [(f"rank {rank}", bar) for rank, bar in single.items()], ""
    size = math.ceil(len(parts) / (SINGLE_RANKS // 2))
    order = list(parts)
    bars: list[tuple[str, Mapping[str, float]]] = [
        (f"rank {r}", single[r]) for r in sorted(words.outliers(result.time, 8))
    ]
    unlike = len(bars)
    for i in range(0, len(order), size):
        group = order[i : i + size]
        names = {c for r in group for c in single[r]}
        mean = {c: sum(single[r].get(c, 0.0) for r in group) / len(group) for c in names}
        bars.append((f"{group[0]}–{group[-1]}", mean))
    note = f"Each bar is the mean of {size} neighbouring ranks"
    return bars, note + (f"; the {unlike} most unlike the others stand above by themselves." if unlike else ".")


def _marks(
    found: Sequence[Outcome], bars: Sequence[tuple[str, Mapping[str, float]]], divisor: float
) -> list[dict[str, Any]]:
    """Beside its bar, the numbers of the findings that lie with a few ranks, and not with all."""
    marks: dict[str, list[str]] = {}
    for number, outcome in enumerate(found, 1):
        if 0 < len(outcome.ranks) <= min(MARKED, len(bars) - 1):
            for rank in outcome.ranks:
                marks.setdefault(f"rank {rank}", []).append(str(number))
    return [
        {
            "x": _round(sum(max(ns, 0.0) for ns in bar.values()) / divisor),
            "xref": "x",
            "xanchor": "left",
            "xshift": 8,
            "y": i,
            "yref": "y",
            "showarrow": False,
            "text": f"◀ {label + ': ' if len(bars) > LABELLED_RANKS else ''}finding {', '.join(marks[label])}",
            "font": {"size": 12, "color": HOT},
        }
        for i, (label, bar) in enumerate(bars)
        if label in marks
    ]


def _stack_table(parts: Mapping[int, Mapping[str, TimePart]], categories: Sequence[str]) -> Table:
    rows = []
    for rank, of_rank in list(parts.items())[:SINGLE_RANKS]:
        cells = []
        for category in categories:
            part = of_rank.get(category)
            cells.append("" if part is None else f"{words.duration(part.ns)} · {words.percent(part.share)}")
        rows.append((str(rank), *cells))
    left = len(parts) - len(rows)
    note = f"{left} more ranks are in result.json." if left else ""
    return Table(
        ("rank", *(words.look(c).name for c in categories)), tuple(rows), (False, *(True for _ in categories)), note
    )


def device(result: Result) -> Table | None:
    """Give the partition of each rank's device span, the mean over ranks first, or None where no device was traced."""
    spans = [d for d in result.device if d.span_ns > 0]
    if not spans:
        return None

    def cells(name: str, span: float, *values: float) -> tuple[str, ...]:
        return (name, words.duration(span), *(f"{words.duration(v)} · {words.percent(v / span)}" for v in values))

    rows = [
        cells(str(d.rank), d.span_ns, d.computation_ns, d.exposed_communication_ns, d.exposed_copy_ns, d.idle_ns)
        for d in spans[:SINGLE_RANKS]
    ]
    if len(spans) > 1:
        sums = [
            sum(getattr(d, f"{part}_ns") for d in spans) / len(spans)
            for part in ("span", "computation", "exposed_communication", "exposed_copy", "idle")
        ]
        rows.insert(0, cells("mean", *sums))
    left = len(spans) - SINGLE_RANKS
    note = f"{left} more ranks are in result.json." if left > 0 else ""
    columns = ("rank", "span", "computation", "exposed communication", "exposed copies", "idle")
    return Table(columns, tuple(rows), (False, *(True,) * 5), note)


# Panels -----------------------------------------------------------------------------------------------------------


def _table(evidence: Panel) -> Figure:
    return Figure("", "", None, _plain_table(evidence.columns, evidence.rows))


def _plain_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    width = max([len(columns), *(len(row) for row in rows[:ROWS])], default=0)
    names = [*columns, *[""] * (width - len(columns))]
    shown = tuple(
        tuple(words.cell(v, c) for v, c in zip([*row, *[""] * (width - len(row))], names, strict=True))
        for row in rows[:ROWS]
    )
    numeric = tuple(i > 0 and _figures([row[i] for row in shown]) for i in range(width))
    left = len(rows) - len(shown)
    return Table(
        tuple(words.header(c) for c in names),
        shown,
        numeric,
        f"{left:,} more rows are in result.json." if left > 0 else "",
    )


# A figure as words.quantity or a rule writes it: "1,204", "−3.1 ms", "31 %", "5 of 8", "—".
_FIGURE = re.compile(f"[{units.MINUS}-]?[0-9][0-9.,]*(?:[ {words.NBSP}]?[^ ]{{1,6}}| of [0-9,]+)?|{units.UNKNOWN}|")


def _figures(cells: Sequence[str]) -> bool:
    """Say whether a column holds figures, to be set flush right, and not words alone."""
    return any(cells) and all(_FIGURE.fullmatch(cell) for cell in cells)


def _bars(evidence: Panel) -> Figure:
    """Few bars lie, with their labels beside them; many stand in a row, in the order given."""
    rows = [(str(row[0]), _number(row[1]), str(row[2]) if len(row) > 2 and row[2] else "") for row in evidence.rows]
    categories = words.ordered(c for _, _, c in rows if c)
    table = _plain_table(
        ("", "value", "category") if categories else ("", "value"),
        [
            (
                label,
                units.UNKNOWN if v is None else words.quantity(v, words.plain(evidence.unit, 24)),
                *([words.look(c).name] if categories else []),
            )
            for label, v, c in rows
        ],
    )
    table = replace(table, numeric=(False, True, False)[: len(table.columns)])
    largest = max((abs(v) for _, v, _ in rows if v is not None), default=0.0)
    divisor, unit = units.scale(words.plain(evidence.unit, 24), largest)
    lying = len(rows) <= 14
    note = ""
    if len(rows) > BARS:
        size = math.ceil(len(rows) / BARS)
        note = f"Each bar is the largest of {size} neighbours."
        rows = [max(rows[i : i + size], key=lambda row: row[1] or 0.0) for i in range(0, len(rows), size)]
    values = [None if v is None else _round(v / divisor) for _, v, _ in rows]
    places = list(range(len(rows)))
    written = ["" if v is None else words.quantity(v, words.plain(evidence.unit, 24)) for _, v, _ in rows]
    trace: dict[str, Any] = {
        "type": "bar",
        "orientation": "h" if lying else "v",
        "x": values if lying else places,
        "y": places if lying else values,
        "marker": {"color": [words.look(c).light if c else SERIES[0] for _, _, c in rows], "line": {"width": 0}},
        "hoverinfo": "text",
        "hovertext": [
            _drawn(f"{words.plain(label, 90)}: {w}", 160) for (label, _, _), w in zip(rows, written, strict=True)
        ],
    }
    value_axis = _axis(unit, rangemode="tozero", nticks=5)
    if lying:
        labels = [words.plain(label, 34) for label, _, _ in rows]
        trace |= {
            "text": [_drawn(w, 40) for w in written],
            "textposition": "outside",
            "cliponaxis": False,
            "textfont": {"color": INK, "size": 12},
        }
        label_axis = _axis(autorange="reversed", tickvals=places, ticktext=[_drawn(t) for t in labels], showgrid=False)
        layout = _layout(28 * len(rows) + 36, _margin(labels), bargap=0.3, xaxis=value_axis, yaxis=label_axis)
        layout["margin"]["r"] = 80
    else:
        every = math.ceil(len(rows) / 8)
        ticks = places[::every]
        label_axis = _axis(
            tickvals=ticks, ticktext=[_drawn(rows[i][0], 14) for i in ticks], showgrid=False, tickangle=0
        )
        layout = _layout(190, 60, bargap=0.15, xaxis=label_axis, yaxis=value_axis)
    most = words.quantity(largest, words.plain(evidence.unit, 24))
    label = f"Bars: {words.plain(evidence.title, 160)}; {len(evidence.rows)} values, the largest {most}."
    return Figure("", label, {"data": [trace], "layout": layout}, table, tuple(categories), note)


def _lines(evidence: Panel) -> Figure:
    """A line for each column after the first; a column named like a category has its colour."""
    names = [words.plain(c, 60) for c in evidence.columns[1:]]
    width = max([len(names), *(len(row) - 1 for row in evidence.rows)], default=0)
    names += [f"series {i + 1}" for i in range(len(names), width)]
    beyond = max(width - LANES, 0)
    width -= beyond
    names = names[:width]
    x_name = evidence.columns[0] if evidence.columns else ""
    numbers = [_number(row[0]) if row else None for row in evidence.rows]
    named = any(n is None for n in numbers)
    xs: list[float] = [float(i) if named else n or 0.0 for i, n in enumerate(numbers)]
    columns = [[_number(row[i + 1]) if len(row) > i + 1 else None for row in evidence.rows] for i in range(width)]
    given = words.plain(evidence.unit, 24)
    largest = max((abs(v) for column in columns for v in column if v is not None), default=0.0)
    divisor, unit = units.scale(given, largest)
    x_divisor, x_unit = units.scale(words.suffix(x_name), max((abs(x) for x in xs), default=0.0))
    room = min(POINTS, max(200, ALL_POINTS // max(width, 1)))
    data = []
    thinned = False
    for i, (name, column) in enumerate(zip(names, columns, strict=True)):
        keep = downsample(column, room)
        thinned = thinned or len(keep) < len(column)
        known = evidence.columns[i + 1] in words.LOOKS if i + 1 < len(evidence.columns) else False
        data.append(
            {
                "type": "scatter",
                "mode": "lines" if len(keep) > 40 else "lines+markers",
                "name": _drawn(words.look(name).name if known else name, 40),
                "x": [_round(xs[k] / x_divisor) for k in keep],
                "y": [_round(v / divisor) if (v := column[k]) is not None else None for k in keep],
                "line": {
                    "color": words.look(name).light if known else SERIES[i % len(SERIES)],
                    "width": 1.6 if width <= 6 else 1,
                    "dash": "solid" if known else ("solid", "dot", "dash")[i // len(SERIES) % 3],
                },
                "marker": {"size": 5},
            }
        )
    x_axis = _axis(x_unit, showgrid=False, fixedrange=False, nticks=10)
    x_axis["title"] = {"text": _drawn(words.header(x_name), 80), "standoff": 6, "font": {"size": 12, "color": MUTE}}
    if named and evidence.rows:
        ticks = list(range(0, len(xs), math.ceil(len(xs) / 8)))
        x_axis |= {"tickvals": ticks, "ticktext": [_drawn(evidence.rows[k][0], 14) for k in ticks]}
    layout = _layout(
        260,
        64,
        xaxis=x_axis,
        yaxis=_axis(unit, rangemode="tozero", nticks=6),
        hovermode="x unified" if width <= 8 else "closest",
        dragmode="zoom",
    )
    layout["margin"]["b"] = 46
    if 1 < width <= 12:
        layout |= {
            "showlegend": True,
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "font": {"color": MUTE}},
        }
        layout["margin"]["t"] = 34
    rows = []
    for name, column in zip(names, columns, strict=True):
        known_values = [v for v in column if v is not None]
        if known_values:
            mean = sum(known_values) / len(known_values)
            figures = [words.quantity(v, given) for v in (min(known_values), mean, max(known_values))]
            rows.append((name, f"{len(known_values):,}", *figures))
        else:
            rows.append((name, "0", units.UNKNOWN, units.UNKNOWN, units.UNKNOWN))
    table = _plain_table(("line", "points", "least", "mean", "most"), rows)
    table = replace(table, numeric=(False, True, True, True, True))
    label = (
        f"Lines: {words.plain(evidence.title, 160)}; {words.counted(width, 'line')} over {len(evidence.rows):,} points."
    )
    note = "Thinned to what a screen can show: the least and the most of each stretch are kept." if thinned else ""
    note += f" {beyond:,} more lines are in result.json." if beyond else ""
    return Figure("", label, {"data": data, "layout": layout}, table, (), note)


def downsample(values: Sequence[float | None], room: int) -> list[int]:
    """Give the places to keep, at most `room`: of each stretch the least and the most, of each gap the first."""
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


@dataclass(frozen=True)
class _Span:
    lane: str
    start: float
    dur: float
    name: str
    category: str


def _timeline(evidence: Panel) -> Figure:
    """A row for each lane, in order of first appearance; long spans beneath, short ones upon them."""
    spans = [
        _Span(str(row[0]), start, max(_number(row[2]) or 0.0, 0.0), str(row[3]), str(row[4] or "other"))
        for row in evidence.rows
        if (start := _number(row[1])) is not None
    ]
    every = list(dict.fromkeys(s.lane for s in spans))
    lanes = every[:LANES]
    spans = [s for s in spans if s.lane in set(lanes)] if len(every) > LANES else spans
    categories = words.ordered(s.category for s in spans)
    first = min(0.0, min((s.start for s in spans), default=0.0))  # a lane may begin before the panel's zero
    end = max((s.start + s.dur for s in spans), default=1.0) or 1.0
    divisor, unit = units.scale("ns", end)
    shown, note = merge(spans, SPANS)
    note += f" {len(every) - LANES:,} more lanes are in result.json." if len(every) > LANES else ""
    shown.sort(key=lambda s: -s.dur)
    place = {lane: i for i, lane in enumerate(lanes)}
    colours = [words.look(s.category).light for s in shown]
    trace = {
        "type": "bar",
        "orientation": "h",
        "y": [place[s.lane] for s in shown],
        "base": [_round(s.start / divisor) for s in shown],
        "x": [_round(s.dur / divisor) for s in shown],
        "width": 0.8,
        "marker": {"color": colours, "line": {"color": CARD, "width": 0.5 if len(shown) <= 300 else 0}},
        "hoverinfo": "text",
        "hovertext": [
            _drawn(f"{words.plain(s.name, 90)} · {words.duration(s.dur)} · {words.look(s.category).name}", 180)
            for s in shown
        ],
        # About seven pixels a letter on a figure of 800: a name that does not fit is left to the pointer.
        "text": [_drawn(s.name, 30) if s.dur / end * 110 > min(len(s.name), 30) else "" for s in shown],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "insidetextfont": {"size": 11, "color": [inside(c) for c in colours], "family": FONT},
    }
    labels = [words.plain(lane, 28) for lane in lanes]
    layout = _layout(
        24 * max(len(lanes), 1) + 40,
        _margin(labels),
        barmode="overlay",
        xaxis=_axis(unit, range=[_round(first / divisor), _round(end / divisor)], fixedrange=False, nticks=9),
        yaxis=_axis(
            range=[len(lanes) - 0.5, -0.5],
            tickvals=list(range(len(lanes))),
            ticktext=[_drawn(t, 40) for t in labels],
            showgrid=False,
        ),
        dragmode="zoom",
        hovermode="closest",
        uniformtext={"mode": "hide", "minsize": 10},
    )
    sums: dict[tuple[str, str], list[float]] = {}
    for s in spans:
        total = sums.setdefault((s.lane, s.category), [0, 0.0])
        total[0] += 1
        total[1] += s.dur
    rows = [(lane, words.look(c).name, f"{n:,}", words.duration(ns)) for (lane, c), (n, ns) in sums.items()]
    table = replace(_plain_table(("lane", "category", "spans", "together"), rows), numeric=(False, False, True, True))
    count = f"{words.counted(len(spans), 'span')} on {words.counted(len(lanes), 'lane')}"
    label = f"Timeline: {words.plain(evidence.title, 160)}; {count} in {words.duration(end)}."
    return Figure("", label, {"data": [trace], "layout": layout}, table, tuple(categories), note)


def merge(spans: Sequence[_Span], room: int) -> tuple[list[_Span], str]:
    """Keep the longest spans, join the others with neighbours of their lane and category, and say so."""
    if len(spans) <= room:
        return list(spans), ""
    alone = room * 2 // 3
    by_length = sorted(range(len(spans)), key=lambda i: -spans[i].dur)
    kept = [spans[i] for i in by_length[:alone]]
    rest = [spans[i] for i in by_length[alone:]]
    end = max(s.start + s.dur for s in spans)
    # Neighbours that begin in the same slot are drawn as one; there are as many slots as the room takes.
    slots = max((room - alone) // len({(s.lane, s.category) for s in rest}), 1)
    together: dict[tuple[str, str, int], list[_Span]] = {}
    for s in sorted(rest, key=lambda s: s.start):
        together.setdefault((s.lane, s.category, int(s.start * slots / end) if end > 0 else 0), []).append(s)
    joined = [
        replace(
            few[0],
            dur=max(s.start + s.dur for s in few) - few[0].start,
            name=few[0].name
            if len(few) == 1
            else f"{len(few)} short spans, together {words.duration(sum(s.dur for s in few))}",
        )
        for few in together.values()
    ]
    return (
        kept + joined,
        f"The {alone:,} longest of {len(spans):,} spans are drawn one by one, shorter neighbours together.",
    )
