"""Timelines: what ran when, a row for each lane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dlprof import units
from dlprof.plain import plain
from dlprof.report import formatting, looks
from dlprof.report.figures import drawing
from dlprof.report.figures.drawing import CARD, HOT, LANES, LINE, Figure, axis, drawn, number, rounded
from dlprof.result import Panel

ROOMY = 16  # so many lanes at most are high
SPANS = 2_000  # drawn one by one in a timeline: about two for each pixel of a wide figure
ARROWS = 100

Arrow = tuple[float, str, str, str]  # time, from lane, to lane, label


@dataclass(frozen=True)
class Span:
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
