"""A comparison of two runs as one page in the look of the report; compare.html. It needs no script and no network.

A ladder of runs in words: what each change gave, from the first run to the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from dlprof.analysis.compare.comparison import NOISE, Comparison, Difference, FindingChange, WorkDifference
from dlprof.analysis.compare.ladder import Ladder, Rung, Step
from dlprof.plain import plain
from dlprof.report import formatting, html, looks
from dlprof.report.compare import text as compare_text
from dlprof.report.compare.summary import Summary
from dlprof.report.figures.drawing import ON_LIGHT, inside
from dlprof.result import Panel, Result
from dlprof.result.stored import plain as data_of
from dlprof.units import MINUS, UNKNOWN, digits

MOST_RANKS = 16  # no bars of single ranks with more of them; the table has MOST_ROWS
MOST_ROWS = 100
MOST_WORK = 25

# The page draws with boxes: it needs its own styles and nothing else.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

QUANTILES = {"5 %": "5th percentile", "50 %": "median", "95 %": "95th percentile", "100 %": "longest"}

WORK = {
    "Ranges": "Time per traced step in the ranges that the script and its frameworks name, with what lies in them.",
    "Operators": "Own time per traced step; on a GPU, the time of the kernels that the operator launched itself.",
    "Kernels": "Time per traced step in the device's kernels, by name.",
    "Collectives": "Transfer time per traced step and rank, by kind, ranks and size.",
}

# In the order of the table.
GROUPS = (("gone", "less"), ("new", "more"), ("same",), ("unknown",))


@dataclass(frozen=True)
class Piece:
    """One part of a stacked bar; `category` names its colour."""

    category: str
    width: float  # percent of the longest bar
    label: str  # inside, where it fits
    title: str


@dataclass(frozen=True)
class Bar:
    """One stacked bar."""

    name: str
    pieces: tuple[Piece, ...]
    total: str


@dataclass(frozen=True)
class Row:
    """One difference: its figures, and a bar from the middle to the left (faster) or right, all in percent."""

    name: str
    category: str
    a: str
    b: str
    change: str
    verdict: str
    left: float
    width: float
    from_: float  # where the margin begins
    margin: float  # how wide it is
    calls: str = ""


def render(c: Comparison) -> str:
    """Return the page as text."""
    first, second = compare_text.headline(c)
    return html.template("compare.html").render(
        title=f"{formatting.name(c.a)} · {plain(first, 120)}",
        css=Markup(html.asset("page.css") + html.asset("compare.css")),
        colours=html.colours() + _inks(),
        policy=POLICY,
        headline=html.inline(first),
        good=compare_text.verdict_of(c) in ("faster", "noise"),
        second=second,
        runs=[("A", c.a.run.path, _lede(c.a)), ("B", c.b.run.path, _lede(c.b))],
        notices=[*c.doubts, *(f"Not compared: {why}." for why in c.not_compared)],
        tiles=_tiles(c),
        bars=_bars(c),
        categories=formatting.ordered(d.name for d in c.time),
        look=looks.look,
        looks=looks.DRAWN,
        time=_rows(c.time, name=lambda n: looks.look(n).name),
        quantiles=_rows(c.quantiles, name=lambda n: QUANTILES.get(n, n)),
        ranks=_rows(c.ranks[:MOST_ROWS]),
        more_ranks=max(len(c.ranks) - MOST_ROWS, 0),
        prediction=c.prediction,
        came_true=compare_text.CAME_TRUE,
        findings=_findings(c.findings),
        states=compare_text.STATES,
        work=[
            (what, note, _work(rows))
            for (what, note), rows in zip(WORK.items(), (c.ranges, c.operators, c.kernels, c.exchanges), strict=True)
            if rows
        ],
        settings=c.settings[:MOST_ROWS],
        measured=c.measured[:MOST_ROWS],
        noise=NOISE,
        dlprof=c.b.dlprof or c.a.dlprof,
    )


def _inks() -> Markup:
    """Return the colours of text on the categories', in both themes: black or white, whichever has WCAG AA contrast."""

    def block(dark: bool) -> str:
        colours = {name: look.dark if dark else look.light for name, look in looks.LOOKS.items()}
        return "".join(f"--i-{n}:{'#000' if inside(c) == ON_LIGHT else '#fff'};" for n, c in colours.items())

    return html.themed(block)


def _lede(result: Result) -> str:
    return f"{formatting.name(result)} · {formatting.devices(result)} · {formatting.steps(result)}"


def _tiles(c: Comparison) -> list[html.Tile]:
    """Return the most important figures."""
    d = c.step
    if d is None or d.a_ns is None or d.b_ns is None or d.ns is None:
        return []
    difference = f"{MINUS if d.ns < 0 else '+'}{formatting.duration(abs(d.ns))}"
    if c.other_work and c.rates is not None:
        r = c.rates
        return [
            html.Tile(digits(r.a_per_s), f"{r.unit} a second of A"),
            html.Tile(digits(r.b_per_s), f"{r.unit} a second of B"),
            html.Tile(formatting.times(r.ratio), f"the {r.unit} a second of A"),
            html.Tile(formatting.duration(d.a_ns), f"a step of A, of {digits(r.a_per_step)} {r.unit}"),
            html.Tile(formatting.duration(d.b_ns), f"a step of B, of {digits(r.b_per_step)} {r.unit}"),
        ]
    tiles = [
        html.Tile(formatting.duration(d.a_ns), "mean steady step of A"),
        html.Tile(formatting.duration(d.b_ns), "mean steady step of B"),
        html.Tile(difference, f"per step{compare_text.margin(d) or ', noise not known'}"),
    ]
    p = c.prediction
    if p is not None:
        least, most = formatting.duration(p.least_ns), formatting.duration(p.most_ns)
        tiles.append(html.Tile(most, "predicted from A" if least == most else f"predicted from A, or down to {least}"))
        if compare_text.came_near(p):
            tiles.append(html.Tile(formatting.percent(p.reached or 0.0), "of the predicted gain was measured"))
    elif d.a_ns and d.b_ns and not c.other_work:
        tiles.append(html.Tile(formatting.times(d.a_ns / d.b_ns), "the steps per second of A"))
    return tiles


def _bars(c: Comparison) -> list[Bar]:
    """Return the mean steps of both runs and, up to MOST_RANKS ranks, each rank's; all on one scale."""
    if not c.time:
        return []
    of = [("A", compare_text.mean_parts(c.a)), ("B", compare_text.mean_parts(c.b))]
    if 1 < len(c.time_by_rank) <= MOST_RANKS:
        of = [(f"{name}, mean", parts) for name, parts in of]
        by_rank = [("A", formatting.by_rank(c.a.time)), ("B", formatting.by_rank(c.b.time))]
        for rank, _ in c.time_by_rank:
            of += [(f"{name}, rank {rank}", parts[rank]) for name, parts in by_rank]
    longest = max(sum(p.ns for p in parts.values()) for _, parts in of) or 1.0
    found = []
    for name, parts in of:
        total = sum(p.ns for p in parts.values()) or 1.0
        pieces = []
        for category in formatting.ordered(parts):
            ns = max(parts[category].ns, 0.0)
            share = ns / total
            title = f"{looks.look(category).name}: {formatting.duration(ns)}, {formatting.percent(share)}"
            label = formatting.about(share) if ns / longest >= 0.06 else ""
            pieces.append(Piece(_colour(category), round(100 * ns / longest, 2), label, title))
        found.append(Bar(name, tuple(pieces), formatting.duration(total)))
    return found


def _colour(category: str) -> str:
    return category if category in looks.LOOKS else "other"


def _rows(differences: Sequence[Difference], calls: Sequence[str] = (), name: Callable[[str], str] = str) -> list[Row]:
    """Return rows whose bars share one scale, wide enough for the largest difference and its margin."""
    reach = max((abs(d.ns or 0.0) + 2 * (d.noise_ns or 0.0) for d in differences), default=0.0) or 1.0
    rows = []
    for i, d in enumerate(differences):
        ns, margin = d.ns or 0.0, 2 * (d.noise_ns or 0.0)
        at, half = 50 * ns / reach, 50 * margin / reach
        rows.append(
            Row(
                name=plain(name(d.name), 100),
                category=_colour(d.name) if d.name in looks.LOOKS else "",
                a=UNKNOWN if d.a_ns is None else formatting.duration(d.a_ns),
                b=UNKNOWN if d.b_ns is None else formatting.duration(d.b_ns),
                change=compare_text.change(d),
                verdict=d.verdict,
                left=round(50 + min(at, 0.0), 2),
                width=round(abs(at), 2),
                from_=round(max(50 + at - half, 0.0), 2),
                margin=round(2 * half, 2),
                calls=calls[i] if calls else "",
            )
        )
    return rows


def _work(work: Sequence[WorkDifference]) -> list[Row]:
    """Return the rows that changed most; collectives have their waiting below their transfer."""
    differences, calls = [], []
    changed = compare_text.changed(work)
    for w in [*changed, *(w for w in work if w not in changed)][:MOST_WORK]:
        both = [UNKNOWN if n is None else digits(round(n, 1)) for n in (w.a_calls, w.b_calls)]
        differences.append(w.time)
        calls.append(both[0] if both[0] == both[1] else " → ".join(both))
        if w.wait is not None:
            differences.append(w.wait)
            calls.append("")
    return _rows(differences, calls)


def _findings(findings: Iterable[FindingChange]) -> list[tuple[FindingChange, str, str]]:
    """Return each finding with what it would save in A and in B."""

    def cell(ns: float | None, state: str) -> str:
        if ns is not None:
            return MINUS + formatting.duration(ns) if ns else "risk"
        return "not known" if state == "unknown" else "none"

    ordered = sorted(findings, key=lambda f: [f.state in group for group in GROUPS].index(True))
    return [(f, cell(f.a_ns, f.state), cell(f.b_ns, f.state)) for f in ordered]


FORMAT = 1


_NOTE = (
    "×: how many times as fast as the run before, ± twice its standard error within the runs, and as the first one; how"
    " much recordings of the same job differ is not part of it."
)


def summary(ladder: Ladder) -> Summary:
    """Return the summary of a ladder; with fewer than two runs, the reason why there is none."""
    rungs, unit = ladder.rungs, ladder.unit
    left_out = tuple(f"{plain(name, 80)} is left out: {plain(why, 400)}" for name, why in ladder.left_out)
    notices = (*left_out, *ladder.doubts)
    if len(rungs) < 2:
        return Summary("compare", "Fewer than two of these runs can be compared.", Panel("table", "The runs", ()))
    per_s = f"{unit} a second"
    columns = ("run", f"{unit}/s", "× before", "× first", "step_ns", "memory_bytes", f"J a {unit[:-1]}", "what changed")
    rows = tuple(_row(n, rung, unit) for n, rung in enumerate(rungs, 1))
    return Summary(
        name=formatting.name(rungs[0].result),
        headline=_headline(rungs, per_s),
        second=_largest(rungs),
        lede=f"{formatting.name(rungs[0].result)} · {formatting.devices(rungs[0].result)} · {len(rungs)} runs",
        notices=notices,
        tiles=_ladder_tiles(rungs, per_s),
        table=Panel("table", "What each change gave", rows, columns, note=_NOTE),
        panels=(
            Panel(
                "bars",
                f"{per_s.capitalize()}, run by run",
                tuple((_label(n, rung), rate(rung.result, unit)) for n, rung in enumerate(rungs, 1)),
            ),
        ),
        bars=f"{unit}/s",
        good=not notices,
    )


def to_json(ladder: Ladder) -> dict[str, Any]:
    """Return a ladder as plain data."""
    rows = []
    for rung in ladder.rungs:
        w = rung.result.window
        rows.append(
            {
                "name": rung.name,
                "run": data_of(rung.result.run),
                "window": data_of(w) if w else None,
                "changes": list(rung.changes),
                "before": data_of(rung.before) if rung.before else None,
                "first": data_of(rung.first) if rung.first else None,
            }
        )
    left_out = [{"name": name, "why": why} for name, why in ladder.left_out]
    return {"format": FORMAT, "unit": ladder.unit, "runs": rows, "left_out": left_out, "doubts": list(ladder.doubts)}


def rate(result: Result, unit: str) -> float | None:
    """Return how many samples, tokens or steps a second a run trains on."""
    w = result.window
    if w is None:
        return None
    if unit == "steps":
        return 1e9 / w.step_ns if w.step_ns else None
    return getattr(w.throughput, f"{unit}_per_s", None)


def times(step: Step | None) -> str:
    """Write a ratio with its margin: "1.31 × ± 0.02"; "" of None."""
    if step is None:
        return ""
    margin = f" ± {2 * step.noise:.2f}" if step.noise is not None else ""
    return f"{formatting.times(step.ratio)}{margin}{' (noise)' if step.verdict == 'noise' else ''}"


def _row(n: int, rung: Rung, unit: str) -> tuple[Any, ...]:
    w, result = rung.result.window, rung.result
    per_s, power = rate(result, unit), w.throughput.power_w if w and w.throughput else None
    joules = power / per_s if power and per_s else None
    changed = "; ".join(rung.changes) if rung.before else "(the first)"
    return (
        _label(n, rung),
        None if per_s is None else float(f"{per_s:.4g}"),
        times(rung.before),
        formatting.times(rung.first.ratio) if rung.first else "",
        w.step_ns if w else None,
        w.memory_bytes if w else None,
        joules,
        changed or "no setting that dlprof records",
    )


def _label(n: int, rung: Rung) -> str:
    name = plain(rung.name, 40)
    return name if name.startswith(f"{n}-") else f"{n} {name}"


def _headline(rungs: tuple[Rung, ...], per_s: str) -> str:
    first, last = rungs[0], rungs[-1]
    unit = per_s.split()[0]
    a, b = rate(first.result, unit), rate(last.result, unit)
    rates = f": {digits(a)} → {digits(b)} {per_s}" if a and b else ""
    step = last.first
    assert step is not None
    if step.verdict == "noise":
        return f"From the first run to the last nothing changed beyond noise{rates}."
    if step.ratio < 1:
        return f"The last run takes {formatting.times(1 / step.ratio)} as long as the first{rates}."
    return f"The last run is {formatting.times(step.ratio)} as fast as the first{rates}."


def _largest(rungs: tuple[Rung, ...]) -> str:
    """Name the change that gave most, and those that took."""
    steps = [(r.before.ratio, r) for r in rungs if r.before is not None and r.before.verdict != "noise"]
    if not steps:
        return ""
    most, rung = max(steps, key=lambda s: s[0])
    said = []
    if most > 1:
        said.append(f"The largest gain is {formatting.times(most)} by {_named(rung)}.")
    worse = [(ratio, r) for ratio, r in steps if ratio < 1]
    if worse:
        ratio, rung = min(worse, key=lambda s: s[0])
        said.append(f"{_named(rung)} cost {formatting.percent(1 - ratio)}.")
    return " ".join(said)


def _named(rung: Rung) -> str:
    return f"{rung.name} ({rung.changes[0]})" if rung.changes else rung.name


def _ladder_tiles(rungs: tuple[Rung, ...], per_s: str) -> tuple[tuple[str, str], ...]:
    unit, found = per_s.split()[0], []
    for rung, which in ((rungs[0], "of the first run"), (rungs[-1], "of the last run")):
        if value := rate(rung.result, unit):
            found.append((digits(value), f"{per_s} {which}"))
    last = rungs[-1].first
    if last is not None:
        found.append((formatting.times(last.ratio), "from the first to the last"))
    return tuple(found)
