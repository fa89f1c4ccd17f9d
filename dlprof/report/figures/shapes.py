"""A panel of a result as a figure: one way to draw for each shape."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from dlprof import units
from dlprof.plain import plain
from dlprof.report import formatting, looks
from dlprof.report.figures import drawing
from dlprof.report.figures.drawing import (
    CARD,
    HOT,
    INK,
    LANES,
    LINE,
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


HORIZONTAL = 14  # with more bars, labels no longer fit beside them


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


ROOMY = 16  # so many lanes at most are high


SPANS = 2_000  # drawn one by one in a timeline: about two for each pixel of a wide figure


ARROWS = 100


Arrow = tuple[float, str, str, str]  # time, from lane, to lane, label


class Span(Struct, frozen=True):
    """What ran; `start` in ns from the panel's zero, `dur` in ns."""

    lane: str
    start: float
    dur: float
    name: str
    category: str


def timeline(evidence: Panel) -> Figure:
    """Draw a row for each lane, in order of first appearance; short spans are drawn over long ones."""
    spans = [
        Span(str(row[0]), start, max(number(row[2]) or 0.0, 0.0), str(row[3]), str(row[4] or "other"))
        for row in evidence.rows
        if (start := number(row[1])) is not None
    ]
    every = list(dict.fromkeys(s.lane for s in spans))
    lanes = every[:LANES]
    spans = [s for s in spans if s.lane in set(lanes)] if len(every) > LANES else spans
    categories = formatting.ordered(s.category for s in spans)
    first = min(0.0, min((s.start for s in spans), default=0.0))  # a lane may begin before the panel's zero
    end = max((s.start + s.dur for s in spans), default=1.0) or 1.0
    divisor, unit = units.scale("ns", end)
    shown, merged = merge(spans, SPANS)
    note = " ".join(filter(None, (merged, drawing.more(len(every) - LANES, "lanes"))))
    shown.sort(key=lambda s: -s.dur)
    place = {lane: i for i, lane in enumerate(lanes)}
    colours = [looks.look(s.category).light for s in shown]
    # About seven pixels a letter on a figure of 800: a name that does not fit is shown on hover only.
    names = [drawn(s.name, 30) if s.dur / end * 110 > min(len(s.name), 30) else "" for s in shown]
    trace = drawing.bars(
        [rounded(s.dur / divisor) for s in shown],
        [place[s.lane] for s in shown],
        colours,
        (f"{plain(s.name, 90)} · {formatting.duration(s.dur)} · {looks.look(s.category).name}" for s in shown),
        0.5 if len(shown) <= 300 else 0,
        base=[rounded(s.start / divisor) for s in shown],
        width=0.8,
        **drawing.bar_text(names, [drawing.inside(c) for c in colours]),
    )
    arrows = [a for a in evidence.arrows if number(a[0]) is not None and {a[1], a[2]} <= place.keys()][:ARROWS]
    labels, groups = _labels(lanes)
    arranged = drawing.layout(
        (24 if len(lanes) <= ROOMY else 18) * max(len(lanes), 1) + 40,
        drawing.margin(labels),
        barmode="overlay",
        xaxis=axis(unit, range=[rounded(first / divisor), rounded(end / divisor)], fixedrange=False, nticks=9),
        yaxis=drawing.lanes(labels, autorange=False, range=[len(lanes) - 0.5, -0.5]),
        dragmode="zoom",
        hovermode="closest",
        uniformtext={"mode": "hide", "minsize": 10},
        shapes=[
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": at, "y1": at, "line": {"color": LINE, "width": 1}}
            for at in groups
        ]
        + [_shaft(arrow, place, divisor) for arrow in arrows],
    )
    sums: dict[tuple[str, str], list[float]] = {}
    for s in spans:
        total = sums.setdefault((s.lane, s.category), [0, 0.0])
        total[0] += 1
        total[1] += s.dur
    rows = [(lane, looks.look(c).name, f"{n:,}", formatting.duration(ns)) for (lane, c), (n, ns) in sums.items()]
    rows += [(label, "", "", "") for *_, label in arrows]
    table = drawing.plain_table(("lane", "category", "spans", "together"), rows, (False, False, True, True))
    count = f"{formatting.counted(len(spans), 'span')} on {formatting.counted(len(lanes), 'lane')}"
    label = f"Timeline: {plain(evidence.title, 160)}; {count} in {formatting.duration(end)}."
    data = [trace, *([_heads(arrows, place, divisor)] if arrows else [])]
    return Figure(label, {"data": data, "layout": arranged}, table, tuple(categories), note)


def _shaft(arrow: Arrow, place: Mapping[str, int], divisor: float) -> dict[str, Any]:
    at, origin, goal, _ = arrow
    line = {"color": HOT, "width": 1.5, "dash": "dot"}
    x = rounded(at / divisor)
    return {"type": "line", "x0": x, "x1": x, "y0": place[origin], "y1": place[goal], "line": line}


def _heads(arrows: Sequence[Arrow], place: Mapping[str, int], divisor: float) -> dict[str, Any]:
    """Return the heads of arrows, each in the lane that it leads to; lane 0 is on top."""
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [rounded(at / divisor) for at, *_ in arrows],
        "y": [place[goal] for _, _, goal, _ in arrows],
        "marker": {
            "symbol": [f"triangle-{'down' if place[goal] > place[origin] else 'up'}" for _, origin, goal, _ in arrows],
            "size": 11,
            "color": HOT,
            "line": {"color": CARD, "width": 1},
        },
        "cliponaxis": False,
        "hoverinfo": "text",
        "hovertext": [drawn(label) for *_, label in arrows],
    }


def _labels(lanes: Sequence[str]) -> tuple[list[str], list[float]]:
    """Return the lanes' labels, and where lines separate groups: neighbours with the same name up to the first " · ".

    Only the first lane of a group has the whole name: rank 0 · thread, computation 7, worker 0.
    """
    parts = [lane.partition(" · ") for lane in lanes]
    follows = [bool(rest) and i > 0 and parts[i - 1][0] == group for i, (group, _, rest) in enumerate(parts)]
    labels = [plain(parts[i][2] if follows[i] else lane, 28) for i, lane in enumerate(lanes)]
    return labels, [i - 0.5 for i in range(1, len(lanes)) if not follows[i]] if any(follows) else []


def merge(spans: Sequence[Span], most: int) -> tuple[list[Span], str]:
    """Keep the longest spans, join the others with neighbours of their lane and category; return a note on it too."""
    if len(spans) <= most:
        return list(spans), ""
    alone = most * 2 // 3
    by_length = sorted(spans, key=lambda s: -s.dur)
    kept, rest = by_length[:alone], by_length[alone:]
    end = max(s.start + s.dur for s in spans)
    # Neighbours that begin in the same slot are drawn as one; the number of slots keeps to `most`.
    slots = max((most - alone) // len({(s.lane, s.category) for s in rest}), 1)
    together: dict[tuple[str, str, int], list[Span]] = {}
    for s in sorted(rest, key=lambda s: s.start):
        together.setdefault((s.lane, s.category, int(s.start * slots / end) if end > 0 else 0), []).append(s)
    joined = []
    for few in together.values():
        several = f"{len(few)} short spans, {formatting.duration(sum(s.dur for s in few))} in total"
        dur = max(s.start + s.dur for s in few) - few[0].start
        joined.append(replace(few[0], dur=dur, name=several if len(few) > 1 else few[0].name))
    return kept + joined, (
        f"The {alone:,} longest of {len(spans):,} spans are drawn separately, shorter neighbours are merged."
    )


FRAMES = 1_500  # that are drawn; others are narrower than a pixel
FLAME_DEPTH = 48
FUNCTIONS = 60  # in the table of a flame graph


def flame(evidence: Panel) -> Figure:
    """Draw a bar per frame; a click on one zooms to it."""
    frames = [
        (int(depth), start, width, str(row[3]), str(row[4] or "other"))
        for row in evidence.rows
        if (depth := number(row[0])) is not None
        and (start := number(row[1])) is not None
        and (width := number(row[2])) is not None
        and 0 <= depth < FLAME_DEPTH
        and width > 0
    ]
    frames = sorted(frames, key=lambda f: -f[2])[:FRAMES]
    end = max((start + width for _, start, width, _, _ in frames), default=1.0)
    whole = sum(width for depth, _, width, _, _ in frames if depth == 0) or end
    deepest = max((f[0] for f in frames), default=0)
    unit = plain(evidence.unit, 24)
    colours = [looks.look(f[4]).light for f in frames]
    hover = (
        f"{plain(name, 90)} · {formatting.quantity(width, unit)} · {formatting.percent(width / whole)}"
        for _, _, width, name, _ in frames
    )
    names = [drawn(name, 60) for _, _, _, name, _ in frames]
    trace = drawing.bars(
        [rounded(f[2]) for f in frames],
        [f[0] for f in frames],
        colours,
        hover,
        0.5,
        base=[rounded(f[1]) for f in frames],
        width=0.94,
        constraintext="none",
        **drawing.bar_text(names, [drawing.inside(c) for c in colours], anchor="start"),
    )
    arranged = drawing.layout(
        21 * (deepest + 1) + 40,
        20,
        barmode="overlay",
        xaxis=axis(range=[0, rounded(end)], fixedrange=False, showticklabels=False, showgrid=False),
        yaxis=axis(range=[deepest + 0.5, -0.5], showticklabels=False, showgrid=False),
        dragmode="zoom",
        hovermode="closest",
        meta={"click": "zoom"},
    )
    # A function that is called in several places is one row; recursive calls count each time.
    seen: dict[tuple[str, str], float] = {}
    for _, _, width, name, category in frames:
        seen[name, category] = seen.get((name, category), 0.0) + width
    rows = [
        (name, looks.look(category).name, formatting.quantity(width, unit), width / whole)
        for (name, category), width in sorted(seen.items(), key=lambda item: -item[1])[:FUNCTIONS]
    ]
    table = drawing.plain_table(("function", "whose", unit, "share"), rows, (False, False, True, True))
    label = f"Flame graph: {plain(evidence.title, 160)}; {formatting.counted(len(frames), 'frame')}."
    categories = tuple(formatting.ordered(f[4] for f in sorted(frames) if f[0]))
    return Figure(label, {"data": [trace], "layout": arranged}, table, categories)
