"""Timelines: what ran when, a row for each lane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dlprof import units
from dlprof.renderers import words
from dlprof.renderers.drawing import (
    CARD,
    FONT,
    LANES,
    Figure,
    axis,
    drawn,
    inside,
    layout,
    margin,
    number,
    plain_table,
    rounded,
)
from dlprof.result import Panel

SPANS = 2_000  # drawn one by one in a timeline: about two for each pixel of a wide figure


@dataclass(frozen=True)
class Span:
    """What ran: from when, how long, in ns from the panel's zero."""

    lane: str
    start: float
    dur: float
    name: str
    category: str


def timeline(evidence: Panel) -> Figure:
    """A row for each lane, in order of first appearance; long spans beneath, short ones upon them."""
    spans = [
        Span(str(row[0]), start, max(number(row[2]) or 0.0, 0.0), str(row[3]), str(row[4] or "other"))
        for row in evidence.rows
        if (start := number(row[1])) is not None
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
        "base": [rounded(s.start / divisor) for s in shown],
        "x": [rounded(s.dur / divisor) for s in shown],
        "width": 0.8,
        "marker": {"color": colours, "line": {"color": CARD, "width": 0.5 if len(shown) <= 300 else 0}},
        "hoverinfo": "text",
        "hovertext": [
            drawn(f"{words.plain(s.name, 90)} · {words.duration(s.dur)} · {words.look(s.category).name}", 180)
            for s in shown
        ],
        # About seven pixels a letter on a figure of 800: a name that does not fit is left to the pointer.
        "text": [drawn(s.name, 30) if s.dur / end * 110 > min(len(s.name), 30) else "" for s in shown],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "insidetextfont": {"size": 11, "color": [inside(c) for c in colours], "family": FONT},
    }
    labels = [words.plain(lane, 28) for lane in lanes]
    arranged = layout(
        24 * max(len(lanes), 1) + 40,
        margin(labels),
        barmode="overlay",
        xaxis=axis(unit, range=[rounded(first / divisor), rounded(end / divisor)], fixedrange=False, nticks=9),
        yaxis=axis(
            range=[len(lanes) - 0.5, -0.5],
            tickvals=list(range(len(lanes))),
            ticktext=[drawn(t, 40) for t in labels],
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
    table = replace(plain_table(("lane", "category", "spans", "together"), rows), numeric=(False, False, True, True))
    count = f"{words.counted(len(spans), 'span')} on {words.counted(len(lanes), 'lane')}"
    label = f"Timeline: {words.plain(evidence.title, 160)}; {count} in {words.duration(end)}."
    return Figure("", label, {"data": [trace], "layout": arranged}, table, tuple(categories), note)


def merge(spans: Sequence[Span], room: int) -> tuple[list[Span], str]:
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
    together: dict[tuple[str, str, int], list[Span]] = {}
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
