"""Where the step goes by rank: its exclusive parts, which ranks the others wait for, what the devices did.

Of many ranks the groups of similar ones, outliers and heat maps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import PurePath
from statistics import median
from typing import Any

from msgspec import Struct

from dlprof import units
from dlprof.plain import plain
from dlprof.report import formatting, looks, verdict
from dlprof.report.figures import drawing, shapes
from dlprof.report.figures.drawing import HOT, INK, SERIES, Figure, Table, axis, drawn, rounded
from dlprof.result import DeviceTime, Outcome, Panel, Result, TimePart
from dlprof.result.figures import Member

MARKED = 4  # findings on more ranks have no marks; these would hide each other
LABELLED_RANKS = 16  # so many have a bar with a label each
SINGLE_RANKS = 128  # so many have a bar each; beyond, those that are alike share one
NAMED_RANKS = 12  # of those that are unlike
CULPRITS = 8  # ranks that others wait for
WORTH_DRAWING = 0.005  # of a step; less, and a shorter wait, is not drawn
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
    unlike = outlying(result.members)
    bars: list[tuple[str, Mapping[str, float]]] = [(f"rank {m.rank}", single[m.rank]) for m in unlike[:NAMED_RANKS]]
    for name, of in by_group(result.members).items():
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


_KINDS = ("kind", "kernels", "time a step_ns", "share", "TFLOP/s", "a second_bytes", "needs at least_ns", "above_ns")


_KINDS_NOTE = (
    "Of a mean traced step. Needs at least: of each operator FLOPs ÷ peak or bytes ÷ bandwidth of the memory, the"
    " longer one, by the data sheet; what is not known counts as it is. This is a bound: on an H200, large copies"
    " reached 88 % of that bandwidth, and a product of 8192³ in bfloat16 68 % of that peak."
)


def device_kinds(result: Result) -> Figure | None:
    """Return the table of the kinds of a device's work, each with its floor; None where no device was traced."""
    work = result.device_work
    if work is None:
        return None
    rows = tuple(
        (
            *(row.kind, row.kernels, row.ns, row.ns / work.ns),
            *(None if n is None else n / row.ns * per for n, per in ((row.flops, 1e-3), (row.bytes, 1e9))),
            None if row.shared_ns else row.floor_ns,
            work.above_ns(row) if row.floor_ns is not None and work.above_ns(row) > 0 else None,
        )
        for row in work.rows
    )
    together = (
        f" Kinds without that figure share {formatting.duration(work.shared_floor_ns)}, and are above it or more."
    )
    note = _KINDS_NOTE + together if work.shared_floor_ns else _KINDS_NOTE
    note = f"Of a mean traced step. What it needs at least is not known: {work.why}." if work.why else note
    return shapes.panel(Panel("table", "Where the device's own time goes", rows, _KINDS, note=note))


_LINES = ("line", "its text", "calls", "time a step_ns", "of it backward_ns", "share")
_LINES_NOTE = (
    "The operators that a line calls, with the functions of the backward pass that they made, in a mean traced step{}."
    " Which line calls what was seen in the one step whose operators were counted."
)


def lines_of_work(result: Result) -> Figure | None:
    """Return the table of the lines by what their operators take; None where that is not known."""
    if not result.lines:
        return None
    rows = tuple(
        (
            f"{one.function} ({PurePath(one.file).name}:{one.line})",
            one.source,
            one.calls,
            one.ns,
            one.backward_ns,
            one.share,
        )
        for one in result.lines
    )
    note = _LINES_NOTE.format(", on the device" if result.device_work is not None else "")
    return shapes.panel(Panel("table", "Lines of the script by what they compute", rows, _LINES, note=note))


# Many ranks: groups of similar ranks, outliers, and heat maps of all ranks.

MOST_NAMED = 64  # outliers that are named
MOST_HOSTS = 128  # rows of a heat map; beyond, neighbouring hosts share one
MOST_WAITED = 24  # hosts that others wait for
WIDE = 100  # an outlier is drawn as wide as one rank of so many
LEVELS = 24  # of a cell's colour
LEAST_SPAN = 0.2  # of the step, from the lightest cell of a row to the darkest
PALEST = 0.15

Parts = Mapping[int, Mapping[str, TimePart]]


class Many(Struct, frozen=True):
    """What the page shows of many ranks."""

    groups: Table
    unlike: Table | None  # None: none is
    by_category: Figure
    by_pair: Figure | None  # None: no rank waits for another, or it is not known


def many(result: Result) -> Many | None:
    """Return what the page shows of the ranks of a large run; None of a small one, and without a breakdown."""
    parts = formatting.by_rank(result.time)
    members = [m for m in result.members if m.rank in parts]
    if not members:
        return None
    groups = by_group(members)
    table = _groups_table(groups, parts)
    return Many(table, _unlike(result, members), _by_category(result, groups, parts, table), _by_pair(result, members))


def by_group(members: Sequence[Member]) -> dict[str, list[Member]]:
    """Return the ranks that are similar to their group, by group, the largest groups first within a stage's name."""
    found: dict[str, list[Member]] = {}
    for member in sorted(members, key=lambda m: m.group):
        if not member.category:
            found.setdefault(member.group, []).append(member)
    return found


def outlying(members: Sequence[Member]) -> list[Member]:
    """Return the outliers, the furthest from the others first."""
    return sorted((m for m in members if m.category), key=lambda m: -abs(m.ns - m.usual_ns))


def _groups_table(groups: Mapping[str, Sequence[Member]], parts: Parts) -> Table:
    categories = _categories(parts)
    rows = []
    for name, members in groups.items():
        hosts = len({m.host for m in members})
        cells = []
        for category in categories:
            shares = sorted(_share_of(parts, m.rank, category) for m in members)
            low, middle, high = (formatting.percent(s) for s in (shares[0], median(shares), shares[-1]))
            cells.append(middle if low == high else f"{middle} ({low} to {high})")
        rows.append((name, f"{len(members):,}", f"{hosts:,}", formatting.ranks(m.rank for m in members), *cells))
    names = tuple(looks.look(c).name for c in categories)
    return Table(
        ("group", "ranks", "hosts", "which", *names), tuple(rows), (False, True, True, False, *(True for _ in names))
    )


def _unlike(result: Result, members: Sequence[Member]) -> Table | None:
    found = outlying(members)
    numbers: dict[int, list[str]] = {}
    for number, outcome in enumerate(result.found, 1):
        # A finding on most of the ranks makes none of them an outlier.
        for rank in outcome.ranks if len(outcome.ranks) <= len(members) / 4 else ():
            numbers.setdefault(rank, []).append(str(number))
    rows = [
        (
            f"rank {m.rank}",
            m.host or "unknown",
            m.group,
            f"{'more' if m.ns > m.usual_ns else 'less'} {looks.look(m.category).name.lower()}",
            formatting.duration(m.ns),
            formatting.duration(m.usual_ns),
            ", ".join(numbers.get(m.rank, ())),
        )
        for m in found[:MOST_NAMED]
    ]
    note = drawing.more(len(found) - len(rows), "ranks that stand out")
    columns = ("rank", "host", "of", "what", "of a step", "its like", "finding")
    return Table(columns, tuple(rows), (False,) * 4 + (True,) * 3, note) if rows else None


class _Cell(Struct, frozen=True):
    """Neighbours with one colour in one row (or column): where they begin, how many they are, and their levels."""

    row: int
    begin: float
    length: float
    level: float
    text: str


def _by_category(result: Result, groups: Mapping[str, Sequence[Member]], parts: Parts, table: Table) -> Figure:
    """Draw each rank's share of the step in each category: outliers first, then group by group."""
    categories = _categories(parts)
    stand_out = outlying(result.members)[:MOST_NAMED]
    each = max(1.0, len(result.members) / WIDE)
    blocks: list[tuple[str, list[int], float]] = [(f"rank {m.rank}", [m.rank], each) for m in stand_out]
    blocks += [(name, [m.rank for m in members], 1.0) for name, members in groups.items()]
    cells: list[_Cell] = []
    at = 0.0
    edges: list[float] = []
    ticks: list[tuple[float, str]] = []
    scales = [_scale([_share_of(parts, m.rank, c) for m in result.members]) for c in categories]
    for name, ranks, width in blocks:
        for row, category in enumerate(categories):
            shares = [_share_of(parts, r, category) for r in ranks]
            cells += _row(row, at, width, ranks, shares, scales[row], name, looks.look(category).name)
        if len(ranks) > 1:
            ticks.append((at + len(ranks) * width / 2, f"{name} · {len(ranks)} ranks"))
            edges.append(at)
        at += len(ranks) * width
    if stand_out:
        ticks.insert(0, (len(stand_out) * each / 2, f"{len(stand_out)} that stand out"))
    labels = [looks.look(c).name for c in categories]
    colours = [looks.look(c).light for c in categories]
    trace = _cells_drawn(cells, [colours[c.row] for c in cells])
    arranged = drawing.layout(
        26 * len(categories) + 40,
        drawing.margin(labels),
        barmode="overlay",
        xaxis=axis(
            range=[0, at], showgrid=False, tickvals=[x for x, _ in ticks], ticktext=[drawn(t, 40) for _, t in ticks]
        ),
        yaxis=drawing.lanes(labels, autorange=False, range=[len(labels) - 0.5, -0.5]),
        shapes=[
            {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": {"color": INK, "width": 1}}
            for x in edges
            if x
        ],
    )
    label = f"Heat map of {len(result.members):,} ranks by category: the darker, the larger the share in its row."
    note = (
        "The darker a cell, the larger the share of the step, among those of its row. Ranks that stand out are wider."
    )
    return Figure(label, {"data": [trace], "layout": arranged}, table, (), note)


def _scale(shares: Sequence[float]) -> Callable[[float], float]:
    """Return how dark a share is drawn, 0 to 1, among those of its row: little of what differs by little."""
    low = min(shares)
    span = max(max(shares) - low, LEAST_SPAN)
    return lambda share: (share - low) / span


def _row(
    row: int,
    at: float,
    width: float,
    ranks: Sequence[int],
    shares: Sequence[float],
    scale: Callable[[float], float],
    name: str,
    what: str,
) -> Iterator[_Cell]:
    """Yield the cells of some ranks in a row: neighbours whose shares are drawn alike are one."""
    for level, several in groupby(range(len(ranks)), key=lambda i: round(scale(shares[i]) * LEVELS)):
        mine = list(several)
        low, high = (formatting.percent(of(shares[i] for i in mine)) for of in (min, max))
        who = formatting.ranks(ranks[i] for i in mine)
        of = f" of {name}" if len(ranks) > 1 else ""
        text = f"{who}{of} · {what}: {low if low == high else f'{low} to {high}'} of the step"
        yield _Cell(row, at + mine[0] * width, len(mine) * width, level / LEVELS, text)


def _by_pair(result: Result, members: Sequence[Member]) -> Figure | None:
    """Draw how long the ranks of each host wait for those of which other hosts, the mean of a host's ranks."""
    if result.window is None:
        return None
    host_of = {m.rank: m.host or f"rank {m.rank}" for m in members}
    hosts = list(dict.fromkeys(host_of.values()))
    size = -(-len(hosts) // MOST_HOSTS)
    place = {host: n // size for n, host in enumerate(hosts)}
    ranks_in = [0] * (max(place.values()) + 1)
    for host in host_of.values():
        ranks_in[place[host]] += 1
    waits: dict[str, dict[int, float]] = {}
    for rank, mine in verdict.waits_for(result).items():
        for culprit, ns in mine.items():
            if culprit in host_of and rank in host_of:
                row = waits.setdefault(host_of[culprit], {})
                at = place[host_of[rank]]
                row[at] = row.get(at, 0.0) + ns / ranks_in[at]
    step = result.window.step_ns
    longest = max((ns for row in waits.values() for ns in row.values()), default=0.0) / step
    most = sorted(waits, key=lambda host: -sum(waits[host].values()))
    most = [host for host in most if max(waits[host].values()) >= WORTH_DRAWING * step][:MOST_WAITED]
    if not most:
        return None
    names = [hosts[n * size] if size == 1 else f"{hosts[n * size]} …" for n in range(len(ranks_in))]
    cells: list[_Cell] = []
    for column, host in enumerate(most):
        cells += _column(column, [waits[host].get(n, 0.0) / step for n in range(len(names))], names, longest, host)
    trace = _cells_drawn(cells, looks.look("waiting").light)
    trace |= {"orientation": "v", "x": trace["y"], "y": trace["x"], "width": 0.9}
    every = max(1, len(names) // 16)
    left = [drawn(names[n], 24) for n in range(0, len(names), every)]
    arranged = drawing.layout(
        min(420, 120 + 4 * len(names)),
        drawing.margin(left),
        barmode="overlay",
        xaxis=axis(
            range=[-0.5, len(most) - 0.5],
            showgrid=False,
            tickvals=list(range(len(most))),
            ticktext=[drawn(h, 24) for h in most],
        ),
        yaxis=axis(
            range=[len(names), 0],
            showgrid=False,
            tickvals=[n + 0.5 for n in range(0, len(names), every)],
            ticktext=left,
        ),
    )
    rows = [
        (names[n], host, formatting.duration(ns), formatting.percent(ns / step))
        for host in most
        for n, ns in sorted(waits[host].items(), key=lambda item: -item[1])
        if ns >= WORTH_DRAWING * step
    ]
    table = drawing.plain_table(
        ("host", "waits for", "a rank, a step", "of the step"), rows, (False, False, True, True)
    )
    label = f"Heat map of how long hosts wait for others: {len(names)} that wait by {len(most)} that are waited for."
    note = "Rows wait for columns. The darker a cell, the longer the ranks of that row wait in a step."
    return Figure(label, {"data": [trace], "layout": arranged}, table, (), note)


def _column(column: int, shares: Sequence[float], names: Sequence[str], most: float, host: str) -> Iterator[_Cell]:
    """Yield the cells of one host that others wait for: neighbours that wait about as long are one."""
    for level, several in groupby(range(len(shares)), key=lambda i: round(shares[i] / most * LEVELS)):
        mine = list(several)
        longest = max(shares[i] for i in mine)
        if longest < WORTH_DRAWING:
            continue
        who = names[mine[0]] if len(mine) == 1 else f"{names[mine[0]]} to {names[mine[-1]]}"
        text = f"{who} · {formatting.percent(longest)} of the step for {host}"
        yield _Cell(column, mine[0], len(mine), level / LEVELS, text)


def _cells_drawn(cells: Sequence[_Cell], colour: Any) -> dict[str, Any]:
    made = drawing.bars(
        [c.length for c in cells],
        [c.row for c in cells],
        colour,
        (c.text for c in cells),
        base=[c.begin for c in cells],
    )
    made["marker"]["opacity"] = [round(PALEST + (1 - PALEST) * c.level, 2) for c in cells]
    return dict(made) | {"width": 0.9}


def _categories(parts: Parts) -> list[str]:
    """Return the categories that take a visible share of any rank's step."""
    every = formatting.ordered(p for of_rank in parts.values() for p in of_rank)
    return [c for c in every if any(_share_of(parts, rank, c) >= WORTH_DRAWING for rank in parts)]


def _share_of(parts: Parts, rank: int, category: str) -> float:
    part = parts[rank].get(category)
    return max(part.share, 0.0) if part else 0.0
