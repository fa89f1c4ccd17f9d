"""A comparison of two runs, as text for a terminal and as a page in the look of the report, compare.html.

Faster or slower, as predicted or not, and by what. The page needs no script and no network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from markupsafe import Markup
from msgspec import Struct

from dlprof.analysis.compare.comparison import (
    NOISE,
    Comparison,
    Difference,
    FindingChange,
    Prediction,
    Setting,
    Verdict,
    WorkDifference,
)
from dlprof.plain import NBSP, plain
from dlprof.report import first as first_screen
from dlprof.report import formatting, html, looks
from dlprof.report.figures.drawing import ON_LIGHT, inside
from dlprof.report.terminal import NARROWEST, columns, legend, painter, stripe, wrap
from dlprof.result import Result, TimePart
from dlprof.units import MINUS, UNKNOWN, digits

MOST_REACHED = 3.0  # of a predicted gain; of a gain of next to nothing any other is a large multiple
MOST_ROWS = 6  # of operators, kernels, collectives and settings; the page has them all

# What became of a finding, in the order in which a reader asks.
STATES = {
    "gone": "gone",
    "new": "new",
    "more": "costs more",
    "less": "costs less",
    "same": "still there",
    "unknown": "not known",
}
CAME_TRUE = {
    "better": "better than predicted",
    "as_predicted": "as predicted, within noise",
    "partly": "less than predicted",
    "missed": "no gain",
    "unknown": "what of it they gained is not known, as the code changed too",
}


def text(c: Comparison, width: int = 80, colour: bool = False) -> str:
    """Return the comparison as lines of at most `width` columns (40 at least), in 256 colours on request."""
    width = max(width, NARROWEST)
    paint = painter(colour)
    lines = []
    for letter, result in (("A", c.a), ("B", c.b)):
        lines += wrap(f"{letter}  {which(result)}", width, "", "   ")
    first, second = headline(c)
    lines += ["", *(paint(line, "1") for line in wrap(first, width, "  "))]
    lines += wrap(second, width, "  ") if second else []
    for warning in (*c.doubts, *(f"not compared: {why}" for why in c.not_compared)):
        lines += [paint(line, "33") for line in wrap(warning, width, "  ! ", "    ")]
    if c.time:
        lines += ["", *_bars(c, width, colour), ""]
        lines += _table([(looks.look(d.name).name, d) for d in notable(c.time)], width)
        quiet = [looks.look(d.name).name.lower() for d in c.time if d not in notable(c.time)]
        lines += wrap(f"no difference, or within noise: {', '.join(quiet)}", width, "  ", "    ") if quiet else []
    spread = {d.name: d for d in c.quantiles}
    if "50 %" in spread and "95 %" in spread:
        median, high = (f"{_cell(d.a_ns)} → {_cell(d.b_ns)}" for d in (spread["50 %"], spread["95 %"]))
        lines += wrap(f"single steps: median {median}, 95th percentile {high}", width, "  ", "    ")
    if c.findings:
        lines += ["", *_findings(c.findings, width)]
    work = (("ranges", c.ranges), ("operators", c.operators), ("kernels", c.kernels), ("collectives", c.exchanges))
    for what, rows in work:
        chosen = changed(rows)[:MOST_ROWS]
        if chosen:
            differences = [(w, d) for w in chosen for d in (w.time, w.wait) if d is not None and d.verdict != "noise"]
            names = [d.name for _, d in differences]
            names = formatting.kernels(names) if what == "kernels" else names
            lines += ["", f"  {what} that changed most, a step"]
            lines += _table(
                [(plain(n, 80) + times_called(w), d) for n, (w, d) in zip(names, differences, strict=True)], width
            )
    if c.settings:
        lines += ["", "  settings that differ"]
        for s in c.settings[:MOST_ROWS]:
            lines += wrap(setting(s), width, "    ", "      ")
        left = len(c.settings) - MOST_ROWS
        lines += [f"    … and {left} more"] if left > 0 else []
    return "\n".join(line.replace(NBSP, " ").rstrip() for line in lines) + "\n"


def which(result: Result) -> str:
    """Name a run with its devices and steps."""
    path, name = plain(result.run.path, 60), formatting.name(result)
    return " · ".join((path, *(() if name == path else (name,)), formatting.devices(result), formatting.steps(result)))


def headline(c: Comparison) -> tuple[str, str]:
    """Return the verdict as one sentence, and one on the prediction; "" where there was none."""
    whole = ""
    if c.whole is not None and c.whole.a_ns and c.whole.b_ns and verdict_of(c) in ("faster", "slower"):
        a, b = (formatting.duration(ns) for ns in (c.whole.a_ns, c.whole.b_ns))
        ratio = c.whole.a_ns / c.whole.b_ns
        factor = f"{formatting.times(ratio)} faster" if ratio >= 1 else f"{formatting.times(1 / ratio)} as long"
        whole = f" {c.whole.name[0].upper()}{c.whole.name[1:]}: {factor} ({b} instead of {a})."
    return _verdict(c) + whole, came_true(c.prediction, c.step) if c.prediction and c.step else ""


def verdict_of(c: Comparison) -> Verdict:
    """Return whether B is faster or slower: by samples a second where steps do different work, else by the step."""
    if c.other_work:
        return c.rates.verdict if c.rates else "unknown"
    return c.step.verdict if c.step else "unknown"


def _verdict(c: Comparison) -> str:
    d = c.step
    if d is None or d.a_ns is None or d.b_ns is None:
        return "The steps of these runs cannot be compared."
    a, b = formatting.duration(d.a_ns), formatting.duration(d.b_ns)
    if c.other_work:
        return _of_other_work(c, a, b)
    if d.verdict == "noise":
        return f"No difference beyond noise: a step takes {a} in A and {b} in B."
    if d.verdict == "unknown":
        return f"A step takes {a} in A and {b} in B; how much of that is noise is not known."
    factor = formatting.times(d.a_ns / d.b_ns if d.verdict == "faster" else d.b_ns / d.a_ns)
    if d.verdict == "faster":
        return f"B is {factor} faster: a step takes {b} instead of {a}."
    return f"B takes {factor} as long: a step takes {b} instead of {a}."


def _of_other_work(c: Comparison, a: str, b: str) -> str:
    """Return the verdict on runs whose steps (which take a and b) do different work: by samples a second."""
    r = c.rates
    if r is None:
        return f"A step takes {a} in A and {b} in B, but they do different work: {c.other_work[0]}."
    rank = " and rank" if r.of == "rank" else ""
    per_s = [f"{digits(n)} {r.unit} a second{rank}" for n in (r.a_per_s, r.b_per_s)]
    steps = f"a step takes {a} in A and {b} in B, of {digits(r.a_per_step)} and {digits(r.b_per_step)} {r.unit}"
    if r.verdict == "noise":
        return f"No difference beyond noise: {per_s[0]} in A and {digits(r.b_per_s)} in B ({steps})."
    if r.verdict == "unknown":
        return f"A trains on {per_s[0]}, B on {digits(r.b_per_s)}; how much of that is noise is not known ({steps})."
    if r.verdict == "faster":
        return f"B is {formatting.times(r.ratio)} faster: {per_s[1]} instead of {digits(r.a_per_s)} ({steps})."
    return f"B takes {formatting.times(1 / r.ratio)} as long: {per_s[1]} instead of {digits(r.a_per_s)} ({steps})."


def came_true(prediction: Prediction, step: Difference) -> str:
    """Say what was predicted and measured: "Predicted 215 ms, measured 244 ms: ..."."""
    least, most = formatting.duration(prediction.least_ns), formatting.duration(prediction.most_ns)
    predicted = least if least == most else f"{least} to {most}"
    why = f" for {', '.join(prediction.changed)}" if prediction.changed else ""
    measured = f"{formatting.duration(prediction.measured_ns)}{margin(step)}"
    share = f", {formatting.percent(prediction.reached or 0.0)} of the gain" if came_near(prediction) else ""
    slower = prediction.verdict == "missed" and step.verdict == "slower"
    how = f"{'slower instead' if slower else CAME_TRUE[prediction.verdict]}{share} (predicted by {prediction.basis})"
    return f"Predicted {predicted}{why}, measured {measured}: {how}."


def came_near(prediction: Prediction) -> bool:
    """Return whether the share of the predicted gain that was measured is worth a number; −1250 % is not."""
    return prediction.reached is not None and 0 < prediction.reached <= MOST_REACHED and prediction.verdict != "missed"


def margin(d: Difference) -> str:
    """Write twice the standard error of a difference as " ± 1.2 ms"; "" where it is not known."""
    return f" ±{NBSP}{formatting.duration(2 * d.noise_ns)}" if d.noise_ns else ""


def change(d: Difference) -> str:
    """Write a difference as "−64.8 ms ± 0.5 ms", with a note where it is within noise."""
    if d.ns is None:
        return UNKNOWN
    if abs(d.ns) < d.least_ns or not d.ns:
        return "within noise"
    said = {"noise": ", within noise", "unknown": ", noise not known"}.get(d.verdict, "")
    return f"{MINUS if d.ns < 0 else '+'}{formatting.duration(abs(d.ns))}{margin(d)}{said}"


def notable(time: Iterable[Difference]) -> list[Difference]:
    """Return the parts of the step that differ by at least `least_ns`, the largest difference first."""
    return sorted((d for d in time if d.ns and abs(d.ns) >= d.least_ns), key=lambda d: -abs(d.ns or 0.0))


def changed(rows: Iterable[WorkDifference]) -> list[WorkDifference]:
    """Return the rows that differ beyond noise in time or waiting, in their order."""
    return [w for w in rows if w.time.verdict != "noise" or (w.wait is not None and w.wait.verdict != "noise")]


def times_called(w: WorkDifference) -> str:
    """Write how often something is called a step, " 12 → 14 ×", where that differs; "" elsewhere."""
    a, b = (UNKNOWN if n is None else digits(n) for n in (w.a_calls, w.b_calls))
    return "" if a == b else f" ({a} → {b} ×)"


def setting(s: Setting) -> str:
    """Write a setting that differs: "Loader · num workers: 0 → 6"."""
    a, b = (plain(value, 60) or "none" for value in (s.a, s.b))
    return f"{plain(s.section, 40)} · {plain(s.name, 60)}: {a} → {b}"


def mean_parts(result: Result) -> dict[str, TimePart]:
    """Return the parts of the mean step as the mean over the ranks: category → part."""
    sums = formatting.mean_ns(result.time)
    total = sum(sums.values()) or 1.0
    return {c: TimePart(-1, c, ns, ns / total) for c, ns in sums.items()}


def _bars(c: Comparison, width: int, colour: bool) -> list[str]:
    """Return both mean steps as bars on one scale, and their legend."""
    parts = {letter: mean_parts(result) for letter, result in (("A", c.a), ("B", c.b))}
    totals = {letter: sum(p.ns for p in of.values()) for letter, of in parts.items()}
    most, longest = max(totals.values()), min(60, width - 16)
    lines = []
    for letter, of in parts.items():
        length = round(longest * totals[letter] / most) if most > 0 else 0
        lines.append(f"  {letter}  {stripe(of, length, colour)} {formatting.duration(totals[letter])}")
    return [*lines, *legend((category for of in parts.values() for category in of), width, colour)]


def _table(rows: Sequence[tuple[str, Difference]], width: int) -> list[str]:
    """Return name, A, B and the difference of each row, in columns where they fit."""
    cells = [(n, _cell(d.a_ns), _cell(d.b_ns), change(d)) for n, d in rows]
    if not cells:
        return []
    longest, a, b, diff = (max(map(columns, column)) for column in zip(*cells, strict=True))
    free = width - a - b - diff - 11
    if free < 12:
        written = (f"{name}: {of_a} → {of_b}, {differs}" for name, of_a, of_b, differs in cells)
        return [line for text in written for line in wrap(text, width, "    ", "      ")]
    column = min(free, longest)
    return [f"    {_fitted(name, column)}  {of_a:>{a}} → {of_b:>{b}}  {differs}" for name, of_a, of_b, differs in cells]


def _fitted(text: str, width: int) -> str:
    cut = text if columns(text) <= width else text[: max(width - 1, 1)] + "…"
    return cut + " " * (width - columns(cut))


def _cell(ns: float | None) -> str:
    return UNKNOWN if ns is None else formatting.duration(ns)


def _findings(findings: Iterable[FindingChange], width: int) -> list[str]:
    lines = []
    for f in findings:
        figures = " → ".join(formatting.duration(ns) if ns is not None else "none" for ns in (f.a_ns, f.b_ns))
        why = f" ({plain(f.why, 120)})" if f.state == "unknown" else ""
        lines += wrap(f"{STATES[f.state]:<11} {plain(f.id, 30)}  {figures}{why}", width, "  ", "              ")
    return lines


PAGE_RANKS = 16  # no bars of single ranks with more of them; the table has PAGE_ROWS
PAGE_ROWS = 100
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


class Piece(Struct, frozen=True):
    """One part of a stacked bar; `category` names its colour."""

    category: str
    width: float  # percent of the longest bar
    label: str  # inside, where it fits
    title: str


class Bar(Struct, frozen=True):
    """One stacked bar."""

    name: str
    pieces: tuple[Piece, ...]
    total: str


class Row(Struct, frozen=True):
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


def page(c: Comparison) -> str:
    """Return the page as text."""
    first, second = headline(c)
    return html.template("compare.html").render(
        title=f"{formatting.name(c.a)} · {plain(first, 120)}",
        css=Markup(html.asset("page.css") + html.asset("compare.css")),
        colours=html.colours() + _inks(),
        policy=POLICY,
        headline=html.inline(first),
        good=verdict_of(c) in ("faster", "noise"),
        second=second,
        runs=[("A", c.a.run.path, first_screen.summary(c.a)), ("B", c.b.run.path, first_screen.summary(c.b))],
        notices=[*c.doubts, *(f"Not compared: {why}." for why in c.not_compared)],
        tiles=_tiles(c),
        bars=_page_bars(c),
        categories=formatting.ordered(d.name for d in c.time),
        look=looks.look,
        looks=looks.DRAWN,
        time=_rows(c.time, name=lambda n: looks.look(n).name),
        quantiles=_rows(c.quantiles, name=lambda n: QUANTILES.get(n, n)),
        ranks=_rows(c.ranks[:PAGE_ROWS]),
        more_ranks=max(len(c.ranks) - PAGE_ROWS, 0),
        prediction=c.prediction,
        came_true=CAME_TRUE,
        findings=_page_findings(c.findings),
        states=STATES,
        work=[
            (what, note, _work(rows))
            for (what, note), rows in zip(WORK.items(), (c.ranges, c.operators, c.kernels, c.exchanges), strict=True)
            if rows
        ],
        settings=c.settings[:PAGE_ROWS],
        measured=c.measured[:PAGE_ROWS],
        noise=NOISE,
        dlprof=c.b.dlprof or c.a.dlprof,
    )


def _inks() -> Markup:
    """Return the colours of text on the categories', in both themes: black or white, whichever has WCAG AA contrast."""

    def block(dark: bool) -> str:
        colours = {name: look.dark if dark else look.light for name, look in looks.LOOKS.items()}
        return "".join(f"--i-{n}:{'#000' if inside(c) == ON_LIGHT else '#fff'};" for n, c in colours.items())

    return html.themed(block)


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
        html.Tile(difference, f"per step{margin(d) or ', noise not known'}"),
    ]
    p = c.prediction
    if p is not None:
        least, most = formatting.duration(p.least_ns), formatting.duration(p.most_ns)
        tiles.append(html.Tile(most, "predicted from A" if least == most else f"predicted from A, or down to {least}"))
        if came_near(p):
            tiles.append(html.Tile(formatting.percent(p.reached or 0.0), "of the predicted gain was measured"))
    elif d.a_ns and d.b_ns and not c.other_work:
        tiles.append(html.Tile(formatting.times(d.a_ns / d.b_ns), "the steps per second of A"))
    return tiles


def _page_bars(c: Comparison) -> list[Bar]:
    """Return the mean steps of both runs and, up to PAGE_RANKS ranks, each rank's; all on one scale."""
    if not c.time:
        return []
    of = [("A", mean_parts(c.a)), ("B", mean_parts(c.b))]
    if 1 < len(c.time_by_rank) <= PAGE_RANKS:
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
                change=change(d),
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
    different = changed(work)
    for w in [*different, *(w for w in work if w not in different)][:MOST_WORK]:
        both = [UNKNOWN if n is None else digits(round(n, 1)) for n in (w.a_calls, w.b_calls)]
        differences.append(w.time)
        calls.append(both[0] if both[0] == both[1] else " → ".join(both))
        if w.wait is not None:
            differences.append(w.wait)
            calls.append("")
    return _rows(differences, calls)


def _page_findings(findings: Iterable[FindingChange]) -> list[tuple[FindingChange, str, str]]:
    """Return each finding with what it would save in A and in B."""

    def cell(ns: float | None, state: str) -> str:
        if ns is not None:
            return MINUS + formatting.duration(ns) if ns else "risk"
        return "not known" if state == "unknown" else "none"

    ordered = sorted(findings, key=lambda f: [f.state in group for group in GROUPS].index(True))
    return [(f, cell(f.a_ns, f.state), cell(f.b_ns, f.state)) for f in ordered]
