"""Where the step goes: its exclusive parts by rank, which ranks the others wait for, and what the devices did."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dlprof import units
from dlprof.plain import plain
from dlprof.report import formatting, looks, verdict
from dlprof.report.figures import drawing, members
from dlprof.report.figures.drawing import HOT, INK, SERIES, Figure, Table, axis, drawn, rounded
from dlprof.result import DeviceTime, Outcome, Result, TimePart

MARKED = 4  # findings on more ranks have no marks; these would hide each other
LABELLED_RANKS = 16  # so many have a bar with a label each
SINGLE_RANKS = 128  # so many have a bar each; beyond, those that are alike share one
NAMED_RANKS = 12  # of those that are unlike
CULPRITS = 8  # ranks that others wait for
WORTH_DRAWING = 0.005  # of a step; a shorter wait is not drawn
VISIBLE = 0.002  # of a bar; less than a pixel is not in the legend

Bars = Sequence[tuple[str, Mapping[str, float]]]  # of each its label, and the ns of each category


def stack(result: Result) -> Figure | None:
    """Return the parts of the mean step as one stacked bar per rank, or None where there is no breakdown.

    Up to LABELLED_RANKS bars carry label and percentages; beyond, they are thin; beyond SINGLE_RANKS neighbouring ranks
    share one (their mean), and the ranks that differ most have bars of their own above.
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
    totals = [sum(max(ns, 0.0) for ns in bar.values()) for _, bar in bars]
    largest = max(totals)
    divisor, unit = units.scale("ns", largest)
    roomy = len(bars) <= LABELLED_RANKS
    height = (30 if roomy else 9 if len(bars) <= 72 else 6) * len(bars) + 36
    each = formatting.unit(result)
    data = []
    for category in categories:
        look = looks.look(category)
        values = [max(bar.get(category, 0.0), 0.0) for _, bar in bars]
        shares = [v / (total or 1.0) for v, total in zip(values, totals, strict=True)]
        hover = (
            f"{label} · {look.name}: {formatting.duration(v)}, {formatting.percent(share)} of the {each}"
            + (_most(waits.get(label, {})) if category == "waiting" else "")
            for (label, _), v, share in zip(bars, values, shares, strict=True)
        )
        texts = [formatting.about(share) if share >= 0.06 else "" for share in shares]
        data.append(
            drawing.bars(
                [rounded(v / divisor) for v in values],
                list(range(len(bars))),
                look.light,
                hover,
                1 if roomy else 0,
                name=drawn(look.name),
                **(drawing.bar_text(texts, drawing.inside(look.light), 11.5) if roomy else {}),
            )
        )
    every = 1 if roomy else max(1, math.ceil(len(bars) / 16))
    ticks = [i for i in range(len(bars)) if i % every == 0 or (not roomy and bars[i][0].startswith("rank") and note)]
    labels = [bars[i][0] for i in ticks]
    arranged = drawing.layout(
        height,
        drawing.margin(labels),
        barmode="stack",
        bargap=0.28 if roomy else 0,
        xaxis=axis(unit, range=[0, rounded(largest / divisor)], nticks=8),
        yaxis=drawing.lanes(labels, tickvals=ticks),
        annotations=_marks(result.found, formatting.numbers(result), bars, totals, divisor),
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
        plain(label, 400),
        {"data": data, "layout": arranged},
        _stack_table(parts, single),
        tuple(c for c in categories if any(bar.get(c, 0.0) >= VISIBLE * sum(bar.values()) for _, bar in bars)),
        note,
    )


def beside(bars: Bars, *, stacked: bool = False) -> Figure:
    """Return bars of what few or many have of each name, ns: stacked, or next to each other.

    A name of a category has its name and colour.
    """
    names = list(dict.fromkeys(name for _, of in bars for name in of))
    known = formatting.ordered(name for name in names if name in looks.DRAWN)
    totals = [sum(of.values()) if stacked else max(of.values()) for _, of in bars]
    divisor, unit = units.scale("ns", max(totals, default=0.0))
    data = []
    for n, name in enumerate([*known, *(name for name in names if name not in known)]):
        called = looks.look(name).name if name in known else name
        colour = looks.look(name).light if name in known else SERIES[n % len(SERIES)]
        values = [of.get(name, 0.0) for _, of in bars]
        hover = (f"{label} · {called}: {formatting.duration(ns)}" for (label, _), ns in zip(bars, values, strict=True))
        data.append(
            drawing.bars(
                [rounded(ns / divisor) for ns in values], list(range(len(bars))), colour, hover, name=drawn(called)
            )
        )
    labels = [looks.look(label).name if label in looks.DRAWN else label for label, _ in bars]
    arranged = drawing.layout(
        (30 if len(bars) <= LABELLED_RANKS else 9) * len(bars) + 64,
        drawing.margin(labels),
        barmode="stack" if stacked else "group",
        xaxis=axis(unit, nticks=8),
        yaxis=drawing.lanes(labels),
        showlegend=True,
        legend={"orientation": "h", "y": 1, "yanchor": "bottom", "traceorder": "normal"},
    )
    rows = [(label, *(of.get(name, 0.0) for name in names)) for label, of in bars]
    table = drawing.plain_table(("", *(f"{name}_ns" for name in names)), rows)
    return Figure(f"Bars of {', '.join(names)}.", {"data": data, "layout": arranged}, table, tuple(known))


def _most(waits: Mapping[int, float]) -> str:
    """Return for which rank a rank waits, or waits most, as the end of a hover text."""
    culprit = next(iter(waits), -1)
    return "" if culprit < 0 else f", {'all' if len(waits) == 1 else 'most'} of it for rank {culprit}"


def _parted(result: Result, parts: Mapping[int, Mapping[str, TimePart]]) -> dict[int, dict[str, float]]:
    """Return the parts of each rank's step in ns, with waiting for other ranks taken out of communication."""
    waits = verdict.waits_for(result)
    parted = {}
    for rank, of_rank in parts.items():
        mine = {c: p.ns for c, p in of_rank.items()}
        waiting = min(sum(waits.get(rank, {}).values()), mine.get("communication", 0.0))
        if waiting >= WORTH_DRAWING * sum(mine.values()) > 0:
            mine |= {"communication": mine["communication"] - waiting, "waiting": waiting}
        parted[rank] = mine
    return parted


def _stack_bars(result: Result, single: Mapping[int, Mapping[str, float]]) -> tuple[Bars, str]:
    """Return the bars, and a note where ranks share them."""
    if len(single) <= SINGLE_RANKS:
        return [(f"rank {rank}", bar) for rank, bar in single.items()], ""
    if result.members:
        return _group_bars(result, single)
    size = math.ceil(len(single) / (SINGLE_RANKS // 2))
    order = list(single)
    outliers = sorted(formatting.outliers(result.time, 8))
    bars: list[tuple[str, Mapping[str, float]]] = [(f"rank {r}", single[r]) for r in outliers]
    for i in range(0, len(order), size):
        group = order[i : i + size]
        bars.append((f"{group[0]}–{group[-1]}", _mean([single[r] for r in group])))
    apart = f", but for the {formatting.counted(len(outliers), 'rank')} on top, which differ most" if outliers else ""
    return bars, f"Each bar is the mean of {size} neighbouring ranks{apart}."


def _mean(bars: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {c: sum(bar.get(c, 0.0) for bar in bars) / len(bars) for c in {c for bar in bars for c in bar}}


def _group_bars(result: Result, single: Mapping[int, Mapping[str, float]]) -> tuple[Bars, str]:
    """Return a bar for each group of similar ranks, below those of the outliers."""
    unlike = members.outliers(result.members)
    bars: list[tuple[str, Mapping[str, float]]] = [(f"rank {m.rank}", single[m.rank]) for m in unlike[:NAMED_RANKS]]
    for name, of in members.by_group(result.members).items():
        bars.append((f"{name} · {formatting.counted(len(of), 'rank')}", _mean([single[m.rank] for m in of])))
    more = drawing.more(len(unlike) - NAMED_RANKS, "ranks that stand out")
    apart = " Ranks that stand out are on top." if unlike else ""
    return bars, f"Each bar of a group is the mean of its ranks.{apart} {more}".strip()


def _marks(
    found: Sequence[Outcome], numbers: Mapping[str, int], bars: Bars, totals: Sequence[float], divisor: float
) -> list[dict[str, Any]]:
    """Return annotations of bars with the numbers of the changes that cure findings of a few ranks, and not of all."""
    marks: dict[str, list[str]] = {}
    for outcome in found:
        number = numbers.get(outcome.id)
        if number and 0 < len(outcome.ranks) <= min(MARKED, len(bars) - 1):
            for rank in outcome.ranks:
                marks.setdefault(f"rank {rank}", []).append(str(number))
    return [
        _right_of(
            totals[i] / divisor,
            i,
            f"◀ {label + ': ' if len(bars) > LABELLED_RANKS else ''}finding {', '.join(marks[label])}",
            HOT,
        )
        for i, (label, _) in enumerate(bars)
        if label in marks
    ]


def _right_of(end: float, row: int, text: str, colour: str) -> dict[str, Any]:
    """Return plotly's annotation to the right of the bar of a row; `end`: where the bar ends."""
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
    note = drawing.more(len(parts) - len(rows), "ranks")
    return Table(("rank", *names), tuple(rows), (False, *(True for _ in names)), note)


def blame(result: Result) -> Figure | None:
    """Return the ranks that others wait for, a bar each, or None where no rank waits, or waiting is not known.

    A bar is the time that the ranks that wait for it do so in the mean step (their mean); its parts are what made it
    late. The rank that costs all ranks together most is on top.
    """
    if result.window is None:
        return None
    every = verdict.culprits(result, WORTH_DRAWING)
    culprits = every[:CULPRITS]
    if not culprits:
        return None
    largest = max(sum(c.why.values()) for c in culprits)
    divisor, unit = units.scale("ns", largest)
    categories = formatting.ordered(category for c in culprits for category in c.why)
    data = []
    for category in categories:
        spent = [c.why.get(category, 0.0) for c in culprits]
        hover = (
            f"rank {c.rank} {verdict.late(category)}: {formatting.duration(ns)} of a {formatting.unit(result)}"
            for c, ns in zip(culprits, spent, strict=True)
        )
        look = looks.look(category)
        x = [rounded(ns / divisor) for ns in spent]
        data.append(drawing.bars(x, list(range(len(culprits))), look.light, hover, 1, name=drawn(look.name)))
    labels = [f"rank {c.rank}" for c in culprits]
    totals = [sum(c.why.values()) for c in culprits]
    who = [f"{formatting.counted(len(c.by), 'rank')} {'waits' if len(c.by) == 1 else 'wait'}" for c in culprits]
    arranged = drawing.layout(
        30 * len(culprits) + 36,
        drawing.margin(labels),
        barmode="stack",
        bargap=0.28,
        xaxis=axis(unit, range=[0, rounded(largest / divisor)], nticks=8),
        yaxis=drawing.lanes(labels),
        annotations=[_right_of(totals[i] / divisor, i, text, INK) for i, text in enumerate(who)],
    )
    arranged["margin"]["r"] = 120
    rows = [
        (f"rank {rank}", *(formatting.duration(ns) if (ns := mine.get(c.rank)) else "" for c in culprits))
        for rank, mine in verdict.waits_for(result).items()
    ]
    table = drawing.plain_table(("waits for", *labels), rows, (False, *(True for _ in culprits)))
    sums = ", ".join(f"{label} {formatting.duration(ns)}" for label, ns in zip(labels, totals, strict=True))
    more = len(every) - len(culprits)
    return Figure(
        f"Stacked bars of how long ranks wait for others, by what makes those late: {sums}.",
        {"data": data, "layout": arranged},
        table,
        tuple(c for c in categories if any(of.why.get(c, 0.0) >= VISIBLE * largest for of in culprits)),
        f"{more} more ranks delay others, for less time." if more else "",
        "Ranks that others wait for",
    )


def device(result: Result) -> Table | None:
    """Return the partition of each rank's device span, the mean over ranks first; None where no device was traced."""
    spans = [d for d in result.device if d.span_ns > 0]
    if not spans:
        return None

    def cells(name: str, of: Sequence[DeviceTime]) -> tuple[str, ...]:
        parts = ("span", "computation", "exposed_communication", "exposed_copy", "idle")
        span, *values = (sum(getattr(d, f"{part}_ns") for d in of) / len(of) for part in parts)
        shares = (f"{formatting.duration(v)} · {formatting.percent(v / span)}" for v in values)
        return (name, formatting.duration(span), *shares)

    rows = [cells(str(d.rank), [d]) for d in spans[:SINGLE_RANKS]]
    if len(spans) > 1:
        rows.insert(0, cells("mean", spans))
    note = drawing.more(len(spans) - SINGLE_RANKS, "ranks")
    columns = ("rank", "span", "computation", "exposed communication", "exposed copies", "idle")
    return Table(columns, tuple(rows), (False, *(True,) * 5), note)
