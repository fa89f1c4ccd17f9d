"""The ranks of a large run: groups of similar ranks, outliers, and heat maps of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Any

from dlprof.report import formatting, looks, verdict
from dlprof.report.figures import drawing
from dlprof.report.figures.drawing import INK, Figure, Table, axis, drawn
from dlprof.result import Result, TimePart
from dlprof.result.figures import Member

MOST_NAMED = 64  # outliers that are named
MOST_HOSTS = 128  # rows of a heat map; beyond, neighbouring hosts share one
MOST_WAITED = 24  # hosts that others wait for
WIDE = 100  # an outlier is drawn as wide as one rank of so many
LEAST = 0.005  # of a step; less is not shown
LEVELS = 24  # of a cell's colour
LEAST_SPAN = 0.2  # of the step, from the lightest cell of a row to the darkest
PALEST = 0.15

Parts = Mapping[int, Mapping[str, TimePart]]


@dataclass(frozen=True)
class Many:
    """What the page shows of many ranks."""

    groups: Table
    unlike: Table | None  # None: none is
    by_category: Figure
    by_pair: Figure | None  # None: no rank waits for another, or it is not known


def shown(result: Result) -> Many | None:
    """Return what the page shows of the ranks of a large run; None of a small one, and without a breakdown."""
    parts = formatting.by_rank(result.time)
    members = [m for m in result.members if m.rank in parts]
    if not members:
        return None
    groups = by_group(members)
    table = _groups(groups, parts)
    return Many(table, _unlike(result, members), _by_category(result, groups, parts, table), _by_pair(result, members))


def specs(many: Many | None) -> dict[str, Figure | None]:
    """Return the figures by the keys under which the page draws them."""
    return {"ranks": many.by_category, "pairs": many.by_pair} if many else {}


def by_group(members: Sequence[Member]) -> dict[str, list[Member]]:
    """Return the ranks that are similar to their group, by group, the largest groups first within a stage's name."""
    found: dict[str, list[Member]] = {}
    for member in sorted(members, key=lambda m: m.group):
        if not member.category:
            found.setdefault(member.group, []).append(member)
    return found


def outliers(members: Sequence[Member]) -> list[Member]:
    """Return the outliers, the furthest from the others first."""
    return sorted((m for m in members if m.category), key=lambda m: -abs(m.ns - m.usual_ns))


# -- tables


def _groups(groups: Mapping[str, Sequence[Member]], parts: Parts) -> Table:
    categories = _categories(parts)
    rows = []
    for name, members in groups.items():
        hosts = len({m.host for m in members})
        cells = []
        for category in categories:
            shares = sorted(_share(parts, m.rank, category) for m in members)
            low, middle, high = (formatting.percent(s) for s in (shares[0], median(shares), shares[-1]))
            cells.append(middle if low == high else f"{middle} ({low} to {high})")
        rows.append((name, f"{len(members):,}", f"{hosts:,}", formatting.ranks(m.rank for m in members), *cells))
    names = tuple(looks.look(c).name for c in categories)
    return Table(
        ("group", "ranks", "hosts", "which", *names), tuple(rows), (False, True, True, False, *(True for _ in names))
    )


def _unlike(result: Result, members: Sequence[Member]) -> Table | None:
    found = outliers(members)
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


# -- heat maps


@dataclass(frozen=True)
class _Cell:
    """Neighbours with one colour in one row (or column): where they begin, how many they are, and their levels."""

    row: int
    begin: float
    length: float
    level: float
    text: str


def _by_category(result: Result, groups: Mapping[str, Sequence[Member]], parts: Parts, table: Table) -> Figure:
    """Draw each rank's share of the step in each category: outliers first, then group by group."""
    categories = _categories(parts)
    stand_out = outliers(result.members)[:MOST_NAMED]
    each = max(1.0, len(result.members) / WIDE)
    blocks: list[tuple[str, list[int], float]] = [(f"rank {m.rank}", [m.rank], each) for m in stand_out]
    blocks += [(name, [m.rank for m in members], 1.0) for name, members in groups.items()]
    cells: list[_Cell] = []
    at = 0.0
    edges: list[float] = []
    ticks: list[tuple[float, str]] = []
    scales = [_scale([_share(parts, m.rank, c) for m in result.members]) for c in categories]
    for name, ranks, width in blocks:
        for row, category in enumerate(categories):
            shares = [_share(parts, r, category) for r in ranks]
            cells += _row(row, at, width, ranks, shares, scales[row], name, looks.look(category).name)
        if len(ranks) > 1:
            ticks.append((at + len(ranks) * width / 2, f"{name} · {len(ranks)} ranks"))
            edges.append(at)
        at += len(ranks) * width
    if stand_out:
        ticks.insert(0, (len(stand_out) * each / 2, f"{len(stand_out)} that stand out"))
    labels = [looks.look(c).name for c in categories]
    colours = [looks.look(c).light for c in categories]
    trace = _bars(cells, [colours[c.row] for c in cells])
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
    most = [host for host in most if max(waits[host].values()) >= LEAST * step][:MOST_WAITED]
    if not most:
        return None
    names = [hosts[n * size] if size == 1 else f"{hosts[n * size]} …" for n in range(len(ranks_in))]
    cells: list[_Cell] = []
    for column, host in enumerate(most):
        cells += _column(column, [waits[host].get(n, 0.0) / step for n in range(len(names))], names, longest, host)
    trace = _bars(cells, looks.look("waiting").light)
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
        if ns >= LEAST * step
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
        if longest < LEAST:
            continue
        who = names[mine[0]] if len(mine) == 1 else f"{names[mine[0]]} to {names[mine[-1]]}"
        text = f"{who} · {formatting.percent(longest)} of the step for {host}"
        yield _Cell(column, mine[0], len(mine), level / LEVELS, text)


def _bars(cells: Sequence[_Cell], colour: Any) -> dict[str, Any]:
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
    return [c for c in every if any(_share(parts, rank, c) >= LEAST for rank in parts)]


def _share(parts: Parts, rank: int, category: str) -> float:
    part = parts[rank].get(category)
    return max(part.share, 0.0) if part else 0.0
