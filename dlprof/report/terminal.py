"""The result as text for a terminal: a first screen that says what to change, and all that was found."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

from dlprof.plain import NBSP, plain
from dlprof.report import first as screen
from dlprof.report import formatting, looks, verdict
from dlprof.report import tried as trials
from dlprof.report.figures import memory, modules
from dlprof.result import Outcome, Result, TimePart
from dlprof.result.tried import Tried
from dlprof.units import short

FIRST_RANKS = 8  # always have bars: the ranks of a host
OUTLIERS = 4  # so many of the others that differ most have bars, too
WHERE = 2  # lines of code shown for a finding's place
NOTICES = 6  # warnings that are printed; the page has them all
NARROWEST = 40  # below this, names no longer fit next to bars


MOST_LINES = 22  # of the first screen
_LEAST_WORDS = 12  # columns that a change's words need beside its figures
_SHOWN_NOTICES, _SHOWN_ROWS = 2, 4  # of it


def first(result: Result, run: str, named: screen.Named, width: int = 80, colour: bool = False) -> str:
    """Return the first screen, of MOST_LINES: the change that gains most, its edit, what proves it, the next ones.

    `run`: as a command names it.
    """
    width = max(width, NARROWEST)
    paint = painter(colour)
    one = screen.first(result, run, named)
    measured = (verdict.described(result) if result.window is None else "") or formatting.steps(result)
    head = _first(wrap(f"{formatting.name(result)} · {formatting.devices(result)} · {measured}", width), 3, width, "")
    head += ["", *(paint(line, "1") for line in _first(wrap(one.headline, width, "  "), 4, width, "  "))]
    dot = f"{screen.KNOWN[one.lead.known][0]} " if one.lead and one.known else ""
    gain = wrap(one.gain, width, f"  {dot}", "    " if dot else "  ")[:4] if one.gain else []
    head += [paint(line, "1;35") if one.lead else line for line in gain]
    notices = verdict.notices(result)
    shown = [paint(line, "33") for line in _brief(notices[:_SHOWN_NOTICES], width, "  ! ")]
    if len(notices) > _SHOWN_NOTICES:
        shown += wrap(f"… {len(notices) - _SHOWN_NOTICES} more warnings (-v)", width, "    ")
    why = _first(wrap(one.why, width, "  "), 3, width, "  ") if one.why else []
    place = _first(wrap(one.place, width, "  "), 1, width, "  ") if one.place else []
    code = _first(wrap(one.detail, width, "    → ", "      "), 2, width, "      ") if one.detail else []
    edit = [_coloured(_cut(line, width, "    "), line, paint) for line in one.diff[:8]]
    gone, put = ([line for line in one.diff if line[:1] == sign] for sign in "-+")
    short = gone if len(gone) < 3 or not put else [gone[0], f"-       … and {len(gone) - 1} more lines"]
    changed = [_coloured(_cut(line, width, "    "), line, paint) for line in [*short, *put]]
    proof = [f"  Try it:  {paint(one.command, '1')}"] if one.command.startswith("dlprof try") else []
    proof = proof or (wrap(f"Then record it again, and: {one.command}", width, "  ") if one.command else [])
    bars = _before_and_after(result, one, width, colour)
    blamed = [line for sentence in verdict.blamed(result)[:1] for line in wrap(sentence, width, "  ")]
    job = wrap(one.job, width, "  run    ", "         ")[:2] if one.job else []
    rows = _rows(one.rows[:_SHOWN_ROWS], width, paint)
    if one.training:
        rows += _rows(one.training[:1], width, paint, f"{verdict.APART}: ")
    tried = f"Tried without a gain: {', '.join(row.text for row in one.useless)}"
    rows += _first(wrap(tried, width, "  "), 2, width, "  ") if one.useless else []
    said = f"{len(one.rows) - _SHOWN_ROWS} more changes. " if len(one.rows) > _SHOWN_ROWS else ""
    closing = _first(wrap(f"{said}{one.looked_at}", width, "  "), 2, width, "  ") if said or one.looked_at else []
    closing += wrap("More: the report, or -v; for an AI assistant: --format md", width, "  ")
    # What does not fit goes, the least important first.
    pieces = [
        [*head, *shown, ""],
        why,
        [*place, *code, *edit],
        proof,
        [""] if why or place or code or edit else [],
        blamed,
        bars,
        job,
        rows,
        closing,
    ]
    for least, keep in ((5, 0), (1, 1), (2, 4), (8, 2), (7, 1), (2, 3), (8, 1), (6, 1), (2, 1), (8, 0), (7, 0), (1, 0)):
        if sum(map(len, pieces)) > MOST_LINES:
            # Of an edit the lines around it go first.
            left = [*place, *code, *changed] if least == 2 else pieces[least]
            pieces[least] = _first(left, keep, width, "  ") if least == 1 and keep else left[:keep]
    return "\n".join(line.replace(NBSP, " ").rstrip() for piece in pieces for line in piece) + "\n"


def _before_and_after(result: Result, one: screen.First, width: int, colour: bool) -> list[str]:
    """Return the bar of the mean step over the ranks with a legend, and on its scale that of the step after.

    Of a job that ran out of memory, bars of that, on the scale of what there was.
    """
    before = formatting.mean_ns(result.time)
    whole = sum(before.values())
    written: Callable[[float], str] = formatting.duration
    bars = [("step", before), ("after", screen.after(result, one.lead) if one.lead else {})]
    if held := memory.at_end(result):
        # What the change makes of each part is not known.
        whole, written = held.limit, lambda count: formatting.quantity(count, "bytes")
        bars = [("end", dict(held.parts)), ("after", {"memory": held.then} if held.then else {})]
    if whole <= 0:
        return []
    length = max(16, min(36, width - 50))
    lines = []
    for label, parts in bars:
        if not parts:
            continue
        total = sum(parts.values())
        bar = _stripe_of(parts, round(length * total / whole), colour)
        bar += " " * (length - columns(bar))
        largest = sorted(parts, key=lambda name: -parts[name])[:3]
        said = "  ".join(
            f"{glyph(name, 1, colour)} {looks.look(name).name.lower()} {formatting.about(parts[name] / total)}"
            for name in largest
            if parts[name] > 0.01 * total and name in looks.DRAWN
        )
        room = width - length - 23
        while columns(said) > room:
            said = said.rpartition("  ")[0]
        lines.append(f"  {label:<5}  {bar}  {written(total):>9}  {said}".rstrip())
    return lines


def _rows(rows: Sequence[screen.Row], width: int, paint: Callable[[str, str], str], apart: str = "") -> list[str]:
    """Return a line for each change: number, words, gain, step before and after; the words are cut to fit."""
    lines = []
    for row, (text, gain, steps) in zip(rows, screen.next_rows(rows), strict=True):
        start = f"  {apart}" if apart else f"  {row.number}  "
        figures = f"{gain:<25}  {steps:>18}" if width >= 80 else gain
        space = width - columns(start) - columns(figures) - 2
        if space < _LEAST_WORDS:
            lines += _first(wrap(f"{text}, {gain}", width, start), 2, width, " " * len(start))
            continue
        words = text if columns(text) <= space else f"{text[: _fit(text, space - 1)]}…"
        lines.append(f"{start}{words}{' ' * (space - columns(words))}  {paint(figures, '35')}")
    return lines


def _brief(sentences: Sequence[str], width: int, start: str) -> list[str]:
    """Return sentences of two lines at most each."""
    return [line for text in sentences for line in _first(wrap(text, width, start, "    "), 2, width, "    ")]


def _coloured(line: str, of: str, paint: Callable[[str, str], str]) -> str:
    return paint(line, {"+": "32", "-": "31"}[of[:1]]) if of[:1] in ("+", "-") else line


def render(result: Result, width: int = 80, colour: bool = False) -> str:
    """Return the report as lines of at most `width` columns (40 at least), in 256 colours on request."""
    width = max(width, NARROWEST)
    paint = painter(colour)
    diagnosis, gain, _ = verdict.headline(result)
    measured = (verdict.described(result) if result.window is None else "") or formatting.steps(result)
    lines = [*wrap(f"{formatting.name(result)} · {formatting.devices(result)} · {measured}", width), ""]
    lines += [paint(line, "1") for line in wrap(diagnosis, width, "  ")]
    lines += wrap(gain, width, "  ")
    if said := verdict.budget(result):
        lines += wrap(said, width, "  ")
    notices = verdict.notices(result)
    if len(notices) > NOTICES:
        notices = [*notices[:NOTICES], f"… and {len(notices) - NOTICES} more warnings, in the report"]
    if notices:
        lines.append("")
    for notice in notices:
        lines += [paint(line, "33") for line in wrap(notice, width, "  ! ", "    ")]
    if result.time:
        lines += ["", *_bars(result, width, colour)]
    for sentence in verdict.blamed(result):
        lines += wrap(sentence, width, "  ")
    lines += _modules(result, width)
    lines += _of_script(result, width)
    if said := verdict.device_floor(result)[0]:
        lines += ["", *wrap(said, width, "  ")]
    if held := memory.sentence(result.footprint):
        lines += ["", *wrap(held, width, "  ")]
    if said := verdict.host_limited(result):
        lines += ["", *wrap(said, width, "  ")]
    if result.found:
        lines += ["", *_findings(result.found, width, colour)]
        together = formatting.together(result)
        lines += ["", *wrap(together, width, "  ")] if together else []
    if apart := result.if_training_may_change:
        lines += ["", *wrap(f"{verdict.APART}:", width, "  "), *_findings(apart, width, colour, numbered=False)]
    if result.tried is not None:
        lines += ["", *(paint(line, "1") for line in wrap(trials.sentence(result.tried), width, "  "))]
    return "\n".join(line.replace(NBSP, " ").rstrip() for line in [*lines, *_closing(result, width)]) + "\n"


def _bars(result: Result, width: int, colour: bool) -> list[str]:
    """Return bars of the first ranks and the outliers, and a legend; all bars are equally long."""
    parts = formatting.by_rank(result.time)
    waits = verdict.waits_for(result)
    order = list(parts)
    first = order[:FIRST_RANKS]
    odd = sorted(set(formatting.outliers(result.time, OUTLIERS + FIRST_RANKS)) - set(first))[:OUTLIERS]
    drawn = order if len(order) <= FIRST_RANKS + 1 else first + odd
    label = max(len(f"rank {rank}") for rank in drawn)
    bar = max(16, min(40, width - label - 49))
    lines = []
    for rank in drawn:
        largest = _largest(parts[rank], waits.get(rank, {}), width - label - bar - 7)
        lines.append(f"  {f'rank {rank}':<{label}}  {stripe(parts[rank], bar, colour)}   {largest}")
    left = [rank for rank in order if rank not in drawn]
    if left:
        busy = [parts[r]["computation"].share if "computation" in parts[r] else 0.0 for r in left]
        least, most = formatting.percent(min(busy)), formatting.percent(max(busy))
        lines += wrap(f"… {len(left)} more: computation {least} to {most}", width, "  ")
    each = "the trace" if formatting.unit(result) == "trace" else "the mean steady step"
    shown = legend((p for of_rank in parts.values() for p in of_rank), width, colour)
    return [*lines, "", *shown, *wrap(f"Each bar is {each} of that rank.", width, "  ")]


def _modules(result: Result, width: int) -> list[str]:
    """Return where in the model the time goes: a line for each of the largest modules and parts outside modules."""
    shown = modules.lines_of(result.modules) if result.modules and result.modules.rows else []
    if not shown:
        return []
    of = "trace" if formatting.unit(result) == "trace" else "traced steps"
    lines = ["", *wrap(f"Where in the model ({of}):", width, "  ")]
    for share, name in shown:
        lines += wrap(name, width, f"  {formatting.percent(share):>7}  ")
    return lines


MOST_OF_SCRIPT = 4


def _of_script(result: Result, width: int) -> list[str]:
    """Return the lines of the script whose operators take most."""
    if not result.lines:
        return []
    lines = ["", *wrap("Lines by what they compute, with their part of the backward pass:", width, "  ")]
    for one in result.lines[:MOST_OF_SCRIPT]:
        name = f"{plain(one.file, 120)}:{one.line} {short(plain(one.source, 200), 60)}"
        lines += wrap(name, width, f"  {formatting.percent(one.share):>7}  ")
    return lines


def legend(categories: Iterable[str], width: int, colour: bool) -> list[str]:
    """Return lines with the glyph and the name of each category."""
    names = {c: looks.look(c).name.replace(" ", NBSP) for c in formatting.ordered(categories)}
    return wrap("   ".join(f"{glyph(c, 1, colour)}{NBSP}{name}" for c, name in names.items()), width, "  ")


def stripe(parts: Mapping[str, TimePart], length: int, colour: bool) -> str:
    """Return a bar of so many columns, divided in proportion; rounding errors do not add up."""
    return _stripe_of({category: part.ns for category, part in parts.items()}, length, colour)


def _stripe_of(parts: Mapping[str, float], length: int, colour: bool) -> str:
    ordered = formatting.ordered(parts)
    whole = sum(max(parts[c], 0.0) for c in ordered)
    if whole <= 0:
        return " " * length
    text, reached, drawn = "", 0.0, 0
    for category in ordered:
        reached += max(parts[category], 0.0)
        end = round(length * reached / whole)
        text += glyph(category, end - drawn, colour)
        drawn = end
    return text


def glyph(category: str, count: int, colour: bool) -> str:
    """Return so many columns of a category's glyph."""
    shape = looks.look(category)
    return painter(colour and count > 0)(shape.glyph * count, f"38;5;{shape.ansi}")


def _largest(parts: Mapping[str, TimePart], waits: Mapping[int, float], most: int) -> str:
    """Return the largest parts in words, in at most `most` columns; waiting for ranks is not in communication."""
    shares = {looks.look(part.category).name.lower(): part.share for part in parts.values()}
    whole = sum(part.ns for part in parts.values())
    if waits and "communication" in parts and whole > 0:
        culprit, ns = next(iter(waits.items()))
        waited = {f"waiting for rank {culprit}" if culprit >= 0 else "waiting for others": ns / whole}
        if len(waits) > 1:
            waited["waiting for others"] = sum(waits.values()) / whole - ns / whole
        name = looks.look("communication").name.lower()
        shares = {**shares, **waited, name: max(shares[name] - sum(waits.values()) / whole, 0.0)}
    text = ""
    for name, share in sorted(shares.items(), key=lambda item: -item[1]):
        more = f"{name} {formatting.about(share)}"
        longer = f"{text}  {more}" if text else more
        if share < 0.005 or columns(longer) > most:
            break
        text = longer
    return text


def _findings(found: Sequence[Outcome], width: int, colour: bool, *, numbered: bool = True) -> list[str]:
    """Return number, rule, saving and speed-up of each; below them the title with its ranks, and the first change."""
    paint = painter(colour)
    digits = len(str(len(found)))
    column = max(columns(plain(o.id, 30)) for o in found)
    lines = []
    for number, outcome in enumerate(found, 1):
        start = f"  {number if numbered else '·':>{digits}}  "
        figures = (
            f"{formatting.saving(outcome):>10}  {formatting.speedup(outcome):>8}  {formatting.margin(outcome)}".rstrip()
        )
        name = plain(outcome.id, 30)
        if len(start) + column + 2 + len(figures) <= width:
            padding = " " * (column - columns(name) + 2)
            lines.append(start + paint(name, "1") + padding + paint(figures, "1;35"))
        else:
            lines += [paint(line, "1") for line in wrap(name, width, start)]
            lines.append(paint(" " * len(start) + figures.strip(), "1;35"))
        where = formatting.ranks(outcome.ranks)
        title = plain(outcome.title, 400)
        indent = " " * len(start)
        lines += wrap(f"{title} ({where})" if where and where not in title.lower() else title, width, indent)
        if outcome.where:
            at = wrap(formatting.where(outcome.where[0]), width, indent + "at ", indent + "   ")
            lines += _first(at, WHERE, width, indent + "   ")
        if where_in := modules.named(outcome.modules):
            lines += _first(wrap(where_in, width, indent + "in ", indent + "   "), WHERE, width, indent + "   ")
        if outcome.advice:
            lines += wrap(plain(outcome.advice[0], 400).replace("`", ""), width, indent + "→ ", indent + "  ")
        for edit in formatting.edits(outcome.changes[0]) if outcome.changes else ():
            shown = plain(edit.expandtabs(4).rstrip("\r"), 400)
            lines.append(paint(_cut(shown, width, indent + "  "), "32" if edit[0] == "+" else "31"))
    return lines


def _first(lines: list[str], most: int, width: int, indent: str) -> list[str]:
    """Return the first of some lines; where there are more, the last one ends with an ellipsis."""
    return lines if len(lines) <= most else [*lines[: most - 1], _cut(f"{lines[most - 1].strip()} …", width, indent)]


def _cut(code: str, width: int, indent: str) -> str:
    """Return a line of code in so many columns, its own indentation kept, and what is too long cut."""
    fits = _fit(code, width - columns(indent) - 1) if columns(indent) + columns(code) > width else len(code)
    return f"{indent}{code[:fits]}{'…' if fits < len(code) else ''}"


def _closing(result: Result, width: int) -> list[str]:
    """Return what else was checked, and how much tracing slowed the traced steps."""
    by_state = formatting.by_state(result)
    said = []
    if by_state["clear"]:
        beside = " beside other programs" if result.foreign_load and result.foreign_load.disturbs else ""
        said.append(f"clear{beside}: {formatting.counted(len(by_state['clear']), 'rule')}")
    if by_state["not_measured"]:
        said.append(f"not measured: {len(by_state['not_measured'])} (the report says why)")
    if by_state["does_not_apply"]:
        said.append(f"does not apply: {len(by_state['does_not_apply'])}")
    if by_state["error"]:
        said.append(f"errors: {', '.join(plain(o.id, 40) for o in by_state['error'])}")
    lines = ["", *wrap(" · ".join(said), width, "  ")] if said else []
    limits = formatting.limits(result)
    return [*lines, *wrap(limits, width, "  ")] if limits else lines


def wrap(text: str, width: int, first: str = "", later: str | None = None) -> list[str]:
    """Break text at spaces, but not at no-break spaces, into lines of at most `width` columns; longer words are cut.

    `first` opens the first line, `later` the others (by default as many spaces).
    """
    later = " " * len(first) if later is None else later
    lines: list[str] = []
    line, empty = first, True
    for word in text.split(" "):
        while True:
            joined = line + word if empty else f"{line} {word}"
            if columns(joined) <= width:
                line, empty = joined, False
                break
            if empty:
                cut = _fit(word, width - columns(line))
                lines.append(line + word[:cut])
                word = word[cut:]
            else:
                lines.append(line)
            line, empty = later, True
    return [*lines, line]


def _fit(text: str, most: int) -> int:
    """Return how many characters of a text fit into `most` columns, at least one."""
    widths = accumulate(map(columns, text))
    return max(sum(1 for used in widths if used <= most), 1)


def columns(text: str) -> int:
    """Return the columns of a text in a terminal: wide characters two, combining ones and colour codes none."""
    total, escape = 0, False
    for char in text:
        if escape:
            escape = char != "m"
        elif char == "\x1b":
            escape = True
        elif not unicodedata.combining(char):
            total += 2 if unicodedata.east_asian_width(char) in "WF" else 1
    return total


def painter(colour: bool) -> Callable[[str, str], str]:
    """Return a function that gives a text an ANSI code, or one that leaves it as it is."""
    return lambda text, code: f"\x1b[{code}m{text}\x1b[0m" if colour else text


def trial(tried: Tried, width: int = 80) -> str:
    """Return what was tried as lines of at most `width` columns (40 at least)."""
    width = max(width, NARROWEST)
    lines = wrap(trials.sentence(tried), width)
    if tried.best is not None and tried.best.before_ns is not None and tried.best.after_ns is not None:
        what = "from the import of PyTorch to the first batch" if tried.best.of == "start" else "a step"
        step = f"{formatting.duration(tried.best.before_ns)} → {formatting.duration(tried.best.after_ns)} {what}"
        lines += wrap(step, width, "  ")
    for title, attempts in (("alone", tried.attempts), ("together", tried.combinations)):
        if attempts:
            lines += ["", f"  {title}" + (", against the best before" if title == "together" else "")]
        for attempt in attempts:
            lines += wrap(trials.row(attempt), width, "    ", "      ")
    notes = (
        [f"{formatting.counted(tried.runs, 'run')} of {formatting.counted(tried.steps, 'step')}"] if tried.runs else []
    )
    notes += [f"{tried.seconds / 60:.1f}{NBSP}min"] if tried.runs else []
    if tried.state != "complete":
        notes.append({"out_of_time": "out of time", "interrupted": "interrupted", "failed": "failed"}[tried.state])
    lines += ["", *wrap(" · ".join(notes), width, "  ")] if notes else []
    for warning in tried.warnings:
        lines += wrap(plain(warning, 300), width, "  ! ", "    ")
    text = "\n".join(line.replace(NBSP, " ").rstrip() for line in lines) + "\n"
    return f"{text}\n{plain(tried.diff, keep=chr(10))}" if tried.diff else text


def to_keep(tried: Tried, words: Sequence[str], lines: Sequence[str], width: int = 80) -> list[str]:
    """Say what of a trial to keep: what the patch changes, and what to do besides, in lines of at most `width`."""
    best = tried.best
    if best is None or best.measured is None:
        unclear = ", ".join(plain(a.words, 100) for a in tried.unclear)
        nothing = "Nothing to keep: no change was found to make the job faster."
        yet = (
            f"Nothing to keep yet: {unclear} may make the job faster. More --minutes, or a quieter machine, will tell."
        )
        return [] if tried.state == "failed" else wrap(yet if unclear else nothing, width)
    said = trials.losses(best) or "its losses were not compared"
    made = [
        "",
        *wrap(
            f"Keep {plain(best.words, 300)}: {trials.measured(best.measured, trials.of_start(best))}; {said}.", width
        ),
    ]
    made += wrap(f"The patch changes {', '.join(map(plain, lines))}.", width) if lines else []
    made += [line for one in words for line in wrap(f"By hand: {plain(one, 400)}", width, "", "  ")]
    return [line.replace(NBSP, " ") for line in made]
