"""Where the step goes: its exclusive parts a rank, and what the devices did."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dlprof import units
from dlprof.plain import plain
from dlprof.report import formatting, looks, verdict
from dlprof.report.figures.drawing import (
    CARD,
    FONT,
    HOT,
    INK,
    Figure,
    Table,
    axis,
    drawn,
    inside,
    layout,
    margin,
    plain_table,
    rounded,
)
from dlprof.result import Outcome, Result, TimePart

MARKED = 4  # ranks of one finding are pointed at; more would hide each other
LABELLED_RANKS = 16  # have a bar with a label each
SINGLE_RANKS = 128  # have a bar each; beyond, neighbours share one
CULPRITS = 8  # ranks that others wait for
WORTH_DRAWING = 0.005  # of a step; a shorter wait is none
VISIBLE = 0.002  # of a bar: less than a pixel needs no explanation of its colour


def stack(result: Result) -> Figure | None:
    """Return the parts of the mean step as one stacked bar a rank, or None where nothing divided the step.

    Up to LABELLED_RANKS bars carry label and percentages; beyond, they are thin; beyond SINGLE_RANKS neighbouring ranks
    share one (their mean), and the most unlike ranks are drawn by themselves above.
    """
    parts = formatting.by_rank(result.time)
    if not parts:
        return None
    categories = formatting.ordered(p for of_rank in parts.values() for p in of_rank)
    single = _parted(result, parts)
    bars, note = _stack_bars(result, single)
    if any("waiting" in bar for _, bar in bars):
        categories.insert(categories.index("communication") + 1, "waiting")
    waits = {f"rank {rank}": of_rank for rank, of_rank in verdict.waits_for(result).items()}
    largest = max(sum(max(ns, 0.0) for ns in bar.values()) for _, bar in bars)
    divisor, unit = units.scale("ns", largest)
    roomy = len(bars) <= LABELLED_RANKS
    height = (30 if roomy else 9 if len(bars) <= 72 else 6) * len(bars) + 36
    each = formatting.unit(result)
    data = []
    for category in categories:
        look = looks.look(category)
        values = [max(bar.get(category, 0.0), 0.0) for _, bar in bars]
        totals = [sum(max(v, 0.0) for v in bar.values()) or 1.0 for _, bar in bars]
        trace: dict[str, Any] = {
            "type": "bar",
            "orientation": "h",
            "name": drawn(look.name),
            "y": list(range(len(bars))),
            "x": [rounded(v / divisor) for v in values],
            "marker": {"color": look.light, "line": {"color": CARD, "width": 1 if roomy else 0}},
            "hoverinfo": "text",
            "hovertext": [
                drawn(
                    f"{label} · {look.name}: {formatting.duration(v)}, {formatting.percent(v / total)} of the {each}"
                    + (_most(waits.get(label, {})) if category == "waiting" else "")
                )
                for (label, _), v, total in zip(bars, values, totals, strict=True)
            ],
        }
        if roomy:
            trace |= {
                "text": [formatting.about(v / t) if v / t >= 0.06 else "" for v, t in zip(values, totals, strict=True)],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "textangle": 0,
                "insidetextfont": {"size": 11.5, "color": inside(look.light), "family": FONT},
            }
        data.append(trace)
    every = 1 if roomy else max(1, math.ceil(len(bars) / 16))
    ticks = [i for i in range(len(bars)) if i % every == 0 or (not roomy and bars[i][0].startswith("rank") and note)]
    labels = [bars[i][0] for i in ticks]
    arranged = layout(
        height,
        margin(labels),
        barmode="stack",
        bargap=0.28 if roomy else 0,
        xaxis=axis(unit, range=[0, rounded(largest / divisor)], nticks=8),
        yaxis=axis(autorange="reversed", tickvals=ticks, ticktext=[drawn(t, 24) for t in labels], showgrid=False),
        annotations=_marks(result.found, bars, divisor),
        uniformtext={"mode": "hide", "minsize": 10},  # on a narrow page plotly would write what nobody can read
    )
    if arranged["annotations"]:
        arranged["margin"]["r"] = 92 if roomy else 142
    shown = ", ".join(
        f"{looks.look(c).name} {formatting.about(s)}" for c, s in list(formatting.mean_shares(result.time).items())[:4]
    )
    many = formatting.counted(len(bars), "bar")
    label = f"Stacked bars of the parts of the mean {each}, {many}. Mean over ranks: {shown}."
    return Figure(
        "",
        plain(label, 400),
        {"data": data, "layout": arranged},
        _stack_table(parts, single),
        tuple(c for c in categories if any(bar.get(c, 0.0) >= VISIBLE * sum(bar.values()) for _, bar in bars)),
        note,
    )


def _most(waits: Mapping[int, float]) -> str:
    """Say for whom a rank waits, or waits most."""
    culprit = next(iter(waits), -1)
    return "" if culprit < 0 else f", {'all' if len(waits) == 1 else 'most'} of it for rank {culprit}"


def _parted(result: Result, parts: Mapping[int, Mapping[str, TimePart]]) -> dict[int, dict[str, float]]:
    """Return the parts of each rank's step in ns, with what it waits for others taken out of its communication."""
    waits = verdict.waits_for(result)
    parted = {}
    for rank, of_rank in parts.items():
        mine = {c: p.ns for c, p in of_rank.items()}
        waiting = min(sum(waits.get(rank, {}).values()), mine.get("communication", 0.0))
        if waiting >= WORTH_DRAWING * sum(mine.values()) > 0:
            mine |= {"communication": mine["communication"] - waiting, "waiting": waiting}
        parted[rank] = mine
    return parted


def _stack_bars(
    result: Result, single: Mapping[int, Mapping[str, float]]
) -> tuple[list[tuple[str, Mapping[str, float]]], str]:
    """What each bar is called and holds in ns, and a note where ranks share bars."""
    if len(single) <= SINGLE_RANKS:
        return [(f"rank {rank}", bar) for rank, bar in single.items()], ""
    size = math.ceil(len(single) / (SINGLE_RANKS // 2))
    order = list(single)
    bars: list[tuple[str, Mapping[str, float]]] = [
        (f"rank {r}", single[r]) for r in sorted(formatting.outliers(result.time, 8))
    ]
    unlike = len(bars)
    for i in range(0, len(order), size):
        group = order[i : i + size]
        names = {c for r in group for c in single[r]}
        mean = {c: sum(single[r].get(c, 0.0) for r in group) / len(group) for c in names}
        bars.append((f"{group[0]}–{group[-1]}", mean))
    note = f"Each bar is the mean of {size} neighbouring ranks"
    if unlike == 1:
        return bars, f"{note}; the one most unlike the others stands above by itself."
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
        _beside(
            sum(max(ns, 0.0) for ns in bar.values()) / divisor,
            i,
            f"◀ {label + ': ' if len(bars) > LABELLED_RANKS else ''}finding {', '.join(marks[label])}",
            HOT,
        )
        for i, (label, bar) in enumerate(bars)
        if label in marks
    ]


def _beside(end: float, row: int, text: str, colour: str) -> dict[str, Any]:
    """Return Plotly's annotation of a text right of the bar of a row that ends there."""
    return {
        "x": rounded(end),
        "xref": "x",
        "xanchor": "left",
        "xshift": 8,
        "y": row,
        "yref": "y",
        "showarrow": False,
        "text": text,
        "font": {"size": 12, "color": colour},
    }


def _stack_table(parts: Mapping[int, Mapping[str, TimePart]], single: Mapping[int, Mapping[str, float]]) -> Table:
    categories = formatting.ordered(p for of_rank in parts.values() for p in of_rank)
    waiting = any("waiting" in bar for bar in single.values())
    rows = []
    for rank, of_rank in list(parts.items())[:SINGLE_RANKS]:
        cells = []
        for category in categories:
            part = of_rank.get(category)
            cells.append("" if part is None else f"{formatting.duration(part.ns)} · {formatting.percent(part.share)}")
            if category == "communication" and waiting:
                cells.append(formatting.duration(single[rank].get("waiting", 0.0)))
        rows.append((str(rank), *cells))
    names = [looks.look(c).name for c in categories]
    if waiting:
        names.insert(categories.index("communication") + 1, "of it waiting")
    left = len(parts) - len(rows)
    note = f"{left} more ranks are in result.json." if left else ""
    return Table(("rank", *names), tuple(rows), (False, *(True for _ in names)), note)


def blame(result: Result) -> Figure | None:
    """Return who is waited for and why, a bar a culprit, or None where nobody waits, or it could not be told.

    A bar is how long those that wait for it do so in the mean step, their mean; its parts are what made it late. Who
    costs all ranks together most stands first.
    """
    if result.window is None:
        return None
    least = WORTH_DRAWING * result.window.step_ns
    waits = verdict.waits_for(result)
    by: dict[int, dict[int, float]] = {}
    for rank, mine in waits.items():
        for culprit, ns in mine.items():
            if culprit >= 0 and ns >= least:
                by.setdefault(culprit, {})[rank] = ns
    why: dict[int, dict[str, float]] = {c: {} for c in by}
    for b in result.blame:
        if b.rank in by.get(b.culprit, ()) and b.ns > 0:
            mine_of = why[b.culprit]
            mine_of[b.category] = mine_of.get(b.category, 0.0) + b.ns / len(by[b.culprit])
    culprits = sorted(by, key=lambda c: -sum(by[c].values()))
    more = len(culprits) - CULPRITS
    culprits = culprits[:CULPRITS]
    if not culprits:
        return None
    largest = max(sum(why[c].values()) for c in culprits)
    divisor, unit = units.scale("ns", largest)
    categories = formatting.ordered(category for c in culprits for category in why[c])
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": drawn(looks.look(category).name),
            "y": list(range(len(culprits))),
            "x": [rounded(why[c].get(category, 0.0) / divisor) for c in culprits],
            "marker": {"color": looks.look(category).light, "line": {"color": CARD, "width": 1}},
            "hoverinfo": "text",
            "hovertext": [
                drawn(
                    f"rank {c} {verdict.LATE.get(category, plain(category, 40))}:"
                    f" {formatting.duration(why[c].get(category, 0.0))} of a {formatting.unit(result)}"
                )
                for c in culprits
            ],
        }
        for category in categories
    ]
    labels = [f"rank {c}" for c in culprits]
    arranged = layout(
        30 * len(culprits) + 36,
        margin(labels),
        barmode="stack",
        bargap=0.28,
        xaxis=axis(unit, range=[0, rounded(largest / divisor)], nticks=8),
        yaxis=axis(autorange="reversed", tickvals=list(range(len(culprits))), ticktext=labels, showgrid=False),
        annotations=[
            _beside(
                sum(why[c].values()) / divisor,
                i,
                f"{formatting.counted(len(by[c]), 'rank')} {'waits' if len(by[c]) == 1 else 'wait'}",
                INK,
            )
            for i, c in enumerate(culprits)
        ],
    )
    arranged["margin"]["r"] = 120
    rows = [
        (f"rank {rank}", *(formatting.duration(mine[c]) if mine.get(c) else "" for c in culprits))
        for rank, mine in waits.items()
    ]
    table = plain_table(("waits for", *labels), rows)
    table = replace(table, numeric=(False, *(True for _ in culprits)))
    told = ", ".join(
        f"{label} {formatting.duration(sum(why[c].values()))}" for label, c in zip(labels, culprits, strict=True)
    )
    label = f"Stacked bars of how long ranks wait for others, by what made those late: {told}."
    note = f"{more} more ranks are waited for, less." if more > 0 else ""
    seen = tuple(c for c in categories if any(why[k].get(c, 0.0) >= VISIBLE * largest for k in culprits))
    return Figure("Who is waited for", label, {"data": data, "layout": arranged}, table, seen, note)


def device(result: Result) -> Table | None:
    """Return partition of each rank's device span, the mean over ranks first, or None where no device was traced."""
    spans = [d for d in result.device if d.span_ns > 0]
    if not spans:
        return None

    def cells(name: str, span: float, *values: float) -> tuple[str, ...]:
        return (
            name,
            formatting.duration(span),
            *(f"{formatting.duration(v)} · {formatting.percent(v / span)}" for v in values),
        )

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
