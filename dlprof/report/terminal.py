"""The result as text for a terminal: the diagnosis first, then a bar for each rank, then what to change."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence

from dlprof.plain import NBSP, plain
from dlprof.report import formatting, looks, verdict
from dlprof.result import Outcome, Result, TimePart

FIRST_RANKS = 8  # so many are drawn in any case, so that a whole host is
OUTLIERS = 4  # and of the others, so many that differ most
NOTICES = 6  # so many warnings are printed; the page has them all
NARROWEST = 40  # below this, words no longer fit beside bars


def render(result: Result, width: int = 80, colour: bool = False) -> str:
    """Return the report as lines of at most `width` columns (40 at least), in 256 colours if asked."""
    width = max(width, NARROWEST)
    paint = _paint if colour else _leave
    diagnosis, gain, _ = verdict.headline(result)
    lines = [*wrap(f"{formatting.name(result)} · {formatting.devices(result)} · {formatting.steps(result)}", width), ""]
    lines += [paint(line, "1") for line in wrap(diagnosis, width, "  ")]
    lines += wrap(gain, width, "  ")
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
    if result.found:
        lines += ["", *_findings(result.found, width, colour)]
        together = formatting.together(result)
        lines += ["", *wrap(together, width, "  ")] if together else []
    return "\n".join(line.replace(NBSP, " ").rstrip() for line in [*lines, *_closing(result, width)]) + "\n"


def _bars(result: Result, width: int, colour: bool) -> list[str]:
    """One bar a rank for the first ranks and the most unlike, then a legend; all bars are as long as the step."""
    parts = formatting.by_rank(result.time)
    waits = verdict.waits_for(result)
    order = list(parts)
    odd = sorted(r for r in formatting.outliers(result.time, OUTLIERS + FIRST_RANKS) if r not in order[:FIRST_RANKS])[
        :OUTLIERS
    ]
    drawn = order if len(order) <= FIRST_RANKS + 1 else order[:FIRST_RANKS] + odd
    label = max(len(f"rank {rank}") for rank in drawn)
    bar = max(16, min(40, width - label - 49))
    room = width - label - bar - 7
    lines = []
    for rank in drawn:
        told = _told(parts[rank], waits.get(rank, {}), room)
        lines.append(f"  {f'rank {rank}':<{label}}  {stripe(parts[rank], bar, colour)}   {told}")
    left = [rank for rank in order if rank not in drawn]
    if left:
        busy = [parts[r]["computation"].share if "computation" in parts[r] else 0.0 for r in left]
        lines += wrap(
            f"… {len(left)} more: computation {formatting.percent(min(busy))} to {formatting.percent(max(busy))}",
            width,
            "  ",
        )
    names = formatting.ordered(p for part in parts.values() for p in part)
    legend = [f"{glyph(c, 1, colour)}{NBSP}{looks.look(c).name.replace(' ', NBSP)}" for c in names]
    each = "the trace" if formatting.unit(result) == "trace" else "the mean steady step"
    return [
        *lines,
        "",
        *wrap("   ".join(legend), width, "  "),
        *wrap(f"Each bar is {each} of that rank.", width, "  "),
    ]


def stripe(parts: Mapping[str, TimePart], length: int, colour: bool) -> str:
    """Fill the length in proportion; what is too small for a column goes to its neighbours, and none is lost."""
    ordered = formatting.ordered(parts)
    whole = sum(max(parts[c].ns, 0.0) for c in ordered)
    if whole <= 0:
        return " " * length
    text, reached, drawn = "", 0.0, 0
    for category in ordered:
        reached += max(parts[category].ns, 0.0)
        end = round(length * reached / whole)
        text += glyph(category, end - drawn, colour)
        drawn = end
    return text


def glyph(category: str, count: int, colour: bool) -> str:
    """Return so many columns of a category's glyph."""
    shape = looks.look(category)
    text = shape.glyph * count
    return _paint(text, f"38;5;{shape.ansi}") if colour and count else text


def _told(parts: Mapping[str, TimePart], waits: Mapping[int, float], room: int) -> str:
    """The largest parts in words, as many as the room takes; what is waiting for whom is none of communication."""
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
        if share < 0.005 or columns(longer) > room:
            break
        text = longer
    return text


def _findings(found: Sequence[Outcome], width: int, colour: bool) -> list[str]:
    """Number, rule, saving, speed-up; below them the title with its ranks, and the first thing to change."""
    paint = _paint if colour else _leave
    digits = len(str(len(found)))
    column = max(columns(plain(o.id, 30)) for o in found)
    lines = []
    for number, outcome in enumerate(found, 1):
        start = f"  {number:>{digits}}  "
        figures = f"{formatting.saving(outcome):>10}  {formatting.speedup(outcome):>7}"
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
        if outcome.advice:
            lines += wrap(plain(outcome.advice[0], 400).replace("`", ""), width, indent + "→ ", indent + "  ")
    return lines


def _closing(result: Result, width: int) -> list[str]:
    """What else was checked, and how much the recording slowed the steps that it traced."""
    by_state = {state: [o for o in result.outcomes if o.state == state] for state in ("clear", "not_measured", "error")}
    said = []
    if by_state["clear"]:
        said.append(f"clear: {formatting.counted(len(by_state['clear']), 'rule')}")
    if by_state["not_measured"]:
        said.append(f"not measured: {len(by_state['not_measured'])} (the report says why)")
    if by_state["error"]:
        said.append(f"errors: {', '.join(plain(o.id, 40) for o in by_state['error'])}")
    lines = ["", *wrap(" · ".join(said), width, "  ")] if said else []
    limits = formatting.limits(result)
    return [*lines, *wrap(limits, width, "  ")] if limits else lines


def wrap(text: str, width: int, first: str = "", later: str | None = None) -> list[str]:
    """Break text at spaces into lines of at most so many columns; a word longer than a line is cut.

    `first` opens the first line, `later` the others (by default as wide as the first). No-break spaces hold.
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


def _fit(text: str, room: int) -> int:
    """How many characters of a text fit, one at least."""
    used = 0
    for n, char in enumerate(text):
        used += columns(char)
        if used > room:
            return max(n, 1)
    return len(text)


def columns(text: str) -> int:
    """How many columns a terminal gives to a text: wide characters two, combining ones and colour codes none."""
    total, escape = 0, False
    for char in text:
        if escape:
            escape = char != "m"
        elif char == "\x1b":
            escape = True
        elif not unicodedata.combining(char):
            total += 2 if unicodedata.east_asian_width(char) in "WF" else 1
    return total


def _paint(text: str, code: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m"


def _leave(text: str, _code: str) -> str:
    return text
