"""The summary of a ladder of runs, a sweep, a scaling study or a what-if: for the terminal and as summary.html.

Each is a verdict, a table and further panels. Those of a what-if (how long a step would take after a change) and of a
ladder (what each change gave, from the first run to the last) are made here, the others in studies.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup
from msgspec import Struct

from dlprof.analysis.compare.ladder import Ladder, Rung, Step
from dlprof.marks import __version__
from dlprof.plain import NBSP, plain
from dlprof.report import formatting, html, looks
from dlprof.report.figures import shapes
from dlprof.report.terminal import NARROWEST, columns, painter, wrap
from dlprof.result import Panel, Result
from dlprof.result.scale import Answer, Answers
from dlprof.result.stored import plain as data_of
from dlprof.units import UNKNOWN, digits

_BAR = 12  # columns of the longest bar in a terminal
_BLOCKS = " ▏▎▍▌▋▊▉█"


class Summary(Struct, frozen=True):
    """A verdict in one or two sentences, warnings, figures in large type, a table, and panels of any shape.

    `bars` names the column of the table that has bars in a terminal. `good`: nothing needs the reader's attention.
    """

    name: str
    headline: str
    table: Panel
    second: str = ""
    lede: str = ""
    notices: tuple[str, ...] = ()
    tiles: tuple[tuple[str, str], ...] = ()  # value and name
    panels: tuple[Panel, ...] = ()
    bars: str = ""
    good: bool = True


def page(s: Summary) -> str:
    """Return the page as text; write it as html.render's."""
    figures = [(f"figure-{i}", shapes.panel(p)) for i, p in enumerate((*s.panels, s.table), 1)]
    specs = {key: figure.spec for key, figure in figures if figure.spec}
    return html.template("summary.html").render(
        title=f"{s.name} · {plain(s.headline, 120)}",
        css=Markup(html.asset("page.css")),
        scripts=tuple(Markup(script) for script in html.scripts()),
        policy=html.policy(),
        colours=html.colours(),
        data=html.data(specs),
        name=s.name,
        headline=html.inline(plain(s.headline, 600)),
        second=s.second,
        lede=s.lede,
        good=s.good,
        notices=s.notices,
        tiles=[html.Tile(*tile) for tile in s.tiles],
        figures=figures,
        looks=looks.DRAWN,
        look=looks.look,
        dlprof=__version__,
    )


def text(s: Summary, width: int = 80, colour: bool = False) -> str:
    """Return the same as lines of at most `width` columns (40 at least), in colours on request; of panels the table."""
    width = max(width, NARROWEST)
    paint = painter(colour)
    lines = [*wrap(plain(s.lede, 400), width), ""] if s.lede else []
    lines += [paint(line, "1") for line in wrap(plain(s.headline, 600), width, "  ")]
    lines += wrap(plain(s.second, 600), width, "  ") if s.second else []
    if s.notices:
        lines.append("")
    for notice in s.notices:
        lines += [paint(line, "33") for line in wrap(plain(notice, 600), width, "  ! ", "    ")]
    if s.table.rows:
        lines += ["", *_table(s, width)]
    if s.table.note:
        lines += ["", *wrap(plain(s.table.note, 600), width, "  ")]
    return "\n".join(line.replace(NBSP, " ").rstrip() for line in lines) + "\n"


def _table(s: Summary, width: int) -> list[str]:
    """Return the table in columns where they fit, else each row as a sentence of its cells."""
    names = s.table.columns
    shown = [[formatting.cell(v, c) for v, c in zip(row, names, strict=True)] for row in s.table.rows]
    heads = [formatting.header(c) for c in names]
    right = [_is_figure([row[i] for row in s.table.rows]) for i in range(len(names))]
    if s.bars in names:
        at = names.index(s.bars)
        for row, bar in zip(shown, _bars([row[at] for row in s.table.rows]), strict=True):
            row.insert(at + 1, bar)
        heads.insert(at + 1, "")
        right.insert(at + 1, False)
    # A column that is empty in all rows is left out.
    kept = [i for i in range(len(heads)) if i == 0 or {row[i] for row in shown} - {UNKNOWN, ""}]
    heads, right = [heads[i] for i in kept], [right[i] for i in kept]
    shown = [[row[i] for i in kept] for row in shown]
    widths = [max(columns(row[i]) for row in [heads, *shown]) for i in range(len(heads))]
    last = 0 if right and right[-1] else widths[-1]
    fixed = 2 * (len(widths) + 1) + sum(widths) - last
    if last and fixed + min(last, 24) > width >= fixed - 2:
        return _below(heads, shown, right, width)
    if fixed + min(last, 24) > width:
        lines = []
        for row in shown:
            cells = [f"{head}: {cell}" if head else cell for head, cell in zip(heads[1:], row[1:], strict=True) if cell]
            lines += wrap(f"{row[0]}  {', '.join(cells)}", width, "  ", "    ")
        return lines
    widths[-1] = min(widths[-1], width - fixed) if last else widths[-1]
    lines = []
    for row in [heads, *shown]:
        *before, end = row
        cells = [_set(cell, w, of) for cell, w, of in zip(before, widths, right, strict=False)]
        start = "  " + "".join(f"{cell}  " for cell in cells)
        lines += wrap(_set(end, widths[-1], True), width, start) if not last else wrap(end, width, start)
    return lines


def _below(heads: Sequence[str], shown: Sequence[Sequence[str]], right: Sequence[bool], width: int) -> list[str]:
    """Return the table with the texts of its last column in lines of their own."""
    widths = [max(columns(row[i]) for row in [heads, *shown]) for i in range(len(heads) - 1)]
    lines = []
    for row in [heads, *shown]:
        cells = [_set(cell, w, of) for cell, w, of in zip(row[:-1], widths, right, strict=False)]
        lines.append("  " + "  ".join(cells))
        lines += wrap(row[-1], width, "      ") if row is not heads and row[-1] else []
    return lines


def _set(cell: str, width: int, right: bool) -> str:
    space = " " * max(width - columns(cell), 0)
    # No-break spaces: wrapping must not take the columns apart.
    return (space + cell if right else cell + space).replace(" ", NBSP)


def _is_figure(cells: Sequence[Any]) -> bool:
    """Return whether a column is set flush right: it holds numbers, or texts that begin with one."""
    known = [cell for cell in cells if cell not in (None, "")]
    return bool(known) and all(isinstance(cell, int | float) or _is_share(str(cell)) for cell in known)


def _is_share(cell: str) -> bool:
    return cell[-1] in "%×" and (cell[0].isdigit() or cell[0] in "−+")


def _bars(values: Sequence[Any]) -> list[str]:
    """Return a bar for each value, as long as its share of the largest."""
    numbers = [v if isinstance(v, int | float) and v > 0 else 0.0 for v in values]
    largest = max(numbers, default=0.0) or 1.0
    bars = []
    for n in numbers:
        eighths = round(8 * _BAR * n / largest)
        bars.append("█" * (eighths // 8) + _BLOCKS[eighths % 8].strip())
    return bars


# What if.

FORMAT = 1  # of both as JSON

_PREDICTED_NOTE = (
    "Predicted by replaying the recording; nothing was run. Nine of ten measurements lie within the range."
)
_SEVERAL = " Each change alone, then all together: their gains overlap."


def of_answers(name: str, found: Answers) -> Summary:
    """Return the of_answers of the answers; `name` is the run's."""
    rows = [*found.alone, *([found.together] if found.together else [])]
    samples = found.throughput.samples_per_s if found.throughput else None
    unit = "samples/s" if samples else "steps/s"
    rate = samples or 1e9 / found.step_ns
    table = Panel(
        "table",
        "Predicted step",
        (
            ("present", found.step_ns, None, "", _rounded(rate)),
            *(_answer_row(a, found.step_ns, rate, together=a is found.together) for a in rows),
        ),
        ("change", "step_ns", "faster_times", "range", unit),
        note=_PREDICTED_NOTE + (_SEVERAL if found.together else ""),
    )
    last = found.together or next((a for a in found.alone if a.step_ns is not None), found.alone[-1])
    bars = tuple((row[0], row[1]) for row in table.rows if row[1] is not None)
    return Summary(
        name=name,
        headline=_answer_headline(last, found.step_ns),
        table=table,
        lede=f"{name} · a step of {formatting.duration(found.step_ns)}, {digits(rate)} {unit}",
        notices=tuple(dict.fromkeys(f"{_changes_of(a)}: {why}" for a in found.alone for why in _whys(a))),
        panels=(Panel("bars", "The mean steady step", bars, unit="ns"),),
        bars=unit,
        good=last.step_ns is not None,
    )


def answers_json(found: Answers) -> dict[str, Any]:
    """Return the answers as plain data."""
    return {"format": FORMAT, **data_of(found)}


def _changes_of(answer: Answer) -> str:
    return " and ".join(answer.changes)


def _whys(answer: Answer) -> tuple[str, ...]:
    return (f"not known: {plain(answer.why, 400)}",) if answer.step_ns is None else answer.unknown


def _answer_row(answer: Answer, step_ns: float, rate: float, *, together: bool) -> tuple[Any, ...]:
    name = "all together" if together else plain(_changes_of(answer), 60)
    if answer.step_ns is None:
        return (name, None, None, "", None)
    factor = step_ns / answer.step_ns if answer.step_ns > 0 else None
    return (name, answer.step_ns, factor, _range(answer, step_ns), None if factor is None else _rounded(rate * factor))


def _range(answer: Answer, step_ns: float) -> str:
    """Write between which speed-ups nine of ten lie, as "1.21 to 1.60"; "" where that is not known, or absurd."""
    then, error = answer.step_ns or 0.0, answer.error_ns
    return f"{step_ns / (then + error):.2f} to {step_ns / (then - error):.2f}" if 0 < error < then < step_ns else ""


def _rounded(rate: float) -> float:
    return float(f"{rate:.4g}")


def _answer_headline(answer: Answer, step_ns: float) -> str:
    what = plain(_changes_of(answer), 200)
    if answer.step_ns is None:
        return f"What {what} would give is not known: {plain(answer.why, 300)}"
    then, now = formatting.duration(answer.step_ns), formatting.duration(step_ns)
    if abs(answer.step_ns / step_ns - 1) < 0.005:
        return f"With {what} a step would take as long as now: {now}."
    if answer.step_ns > step_ns:
        return f"With {what} a step would take longer: {then} instead of {now}."
    between = f" ({_range(answer, step_ns)})" if _range(answer, step_ns) else ""
    faster = f"{formatting.times(step_ns / answer.step_ns)} faster{between}"
    return f"With {what} a step would take {then} instead of {now}: {faster}."


# Ladders.

_LADDER_NOTE = (
    "×: how many times as fast as the run before, ± twice its standard error within the runs, and as the first one; how"
    " much recordings of the same job differ is not part of it."
)


def of_ladder(ladder: Ladder) -> Summary:
    """Return the of_ladder of a ladder; with fewer than two runs, the reason why there is none."""
    rungs, unit = ladder.rungs, ladder.unit
    left_out = tuple(f"{plain(name, 80)} is left out: {plain(why, 400)}" for name, why in ladder.left_out)
    notices = (*left_out, *ladder.doubts)
    if len(rungs) < 2:
        return Summary("compare", "Fewer than two of these runs can be compared.", Panel("table", "The runs", ()))
    per_s = f"{unit} a second"
    columns = ("run", f"{unit}/s", "× before", "× first", "step_ns", "memory_bytes", f"J a {unit[:-1]}", "what changed")
    rows = tuple(_rung_row(n, rung, unit) for n, rung in enumerate(rungs, 1))
    return Summary(
        name=formatting.name(rungs[0].result),
        headline=_ladder_headline(rungs, per_s),
        second=_largest(rungs),
        lede=f"{formatting.name(rungs[0].result)} · {formatting.devices(rungs[0].result)} · {len(rungs)} runs",
        notices=notices,
        tiles=_ladder_tiles(rungs, per_s),
        table=Panel("table", "What each change gave", rows, columns, note=_LADDER_NOTE),
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


def ladder_json(ladder: Ladder) -> dict[str, Any]:
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


def _rung_row(n: int, rung: Rung, unit: str) -> tuple[Any, ...]:
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


def _ladder_headline(rungs: tuple[Rung, ...], per_s: str) -> str:
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
        said.append(f"The largest gain is {formatting.times(most)} by {_rung_named(rung)}.")
    worse = [(ratio, r) for ratio, r in steps if ratio < 1]
    if worse:
        ratio, rung = min(worse, key=lambda s: s[0])
        said.append(f"{_rung_named(rung)} cost {formatting.percent(1 - ratio)}.")
    return " ".join(said)


def _rung_named(rung: Rung) -> str:
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
