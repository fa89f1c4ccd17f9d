"""The first screen of the page: bars of the run, of a step and of a step after the change, and its edit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from msgspec import Struct

from dlprof.plain import plain
from dlprof.report import first, formatting, looks
from dlprof.report.figures import drawing, memory
from dlprof.result import Result
from dlprof.units import MINUS

WRITTEN = 0.11  # of a bar: a part as wide has its name inside
VISIBLE = 0.002  # of a bar: less than a pixel is left out
MOST_LINES = 16  # of an edit
AXIS = 0.5  # a list's axis begins at 1 times, and is so long


class Part(NamedTuple):
    """A part of a bar: its width in percent, the page's name of its colour ("": it is gone), and what is in it."""

    width: float
    colour: str
    text: str = ""
    ink: str = ""


class Bar(NamedTuple):
    """One bar; `label` says what it shows."""

    name: str
    parts: tuple[Part, ...]
    total: str
    label: str


class Made(Struct, frozen=True):
    """What the time is made of: bars of the job and of steps, their legends, and a path from the first to the second.

    Of a job that ran out of memory, what that is made of. Of the job's legend colour and words, of the steps' colour,
    name and time. `title`: what the bars show; `parts`: what the second legend names.
    """

    title: str
    parts: str

    job: Bar | None
    job_legend: tuple[tuple[str, str], ...]
    steps: tuple[Bar, ...]
    legend: tuple[tuple[str, str, str], ...]
    zoom: str


# The parts of the job's bar, of which parts of the run each is, and their colours.
_JOB: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("start-up", ("launch", "setup", "first_batch"), "c-epoch"),
    ("training", ("warmup", "steady", "traced", "epoch_ends"), "bar"),
    ("validation", ("validation",), "c-validation"),
    ("other steps", ("other",), "c-other"),
    ("standing still", ("stalled", "suspended"), "c-suspended"),
    ("the end", ("end",), "c-waiting"),
)


def made(result: Result, shown: first.First) -> Made | None:
    """Return the bars of a result; None without steps."""
    if held := memory.at_end(result):
        return _of_memory(held)
    if result.window is None or not result.time:
        return None
    step, each, lead = result.window.step_ns, formatting.unit(result), shown.lead
    now = {name: share * step for name, share in formatting.mean_shares(result.time).items() if share > 0}
    now = {name: now[name] for name in formatting.ordered(now)}
    after = first.after(result, lead) if lead else {}
    bars = [_bar(each, now, step, f"A {each} now")]
    if lead and after:
        then = {name: after.get(name, 0.0) for name in now}
        bars.append(_bar("after", then, step, "A step after the change", lead.before_ns - lead.after_ns))
    legend = tuple(
        (_colour(name), looks.look(name).name, _from_to(ns, after.get(name, ns)))
        for name, ns in now.items()
        if ns >= VISIBLE * step
    )
    of = {part.part: part.share for part in result.budget}
    parts = [(name, share, c) for name, mine, c in _JOB if (share := sum(of.get(p, 0.0) for p in mine)) >= VISIBLE]
    total = formatting.duration(sum(part.ns for part in result.budget))
    said = ", ".join(f"{name} {formatting.about(share)}" for name, share, _ in parts)
    job = Bar("run", tuple(Part(_percent(share), c) for _, share, c in parts), total, f"The run, {total}: {said}")
    at = next((n for n, part in enumerate(parts) if part[0] == "training"), None)
    ends = [_percent(sum(share for _, share, _ in parts[:n])) for n in range(len(parts) + 1)]
    return Made(
        "What the time is made of",
        f"Parts of a step{', now and after the change' if len(bars) > 1 else ''}",
        job if len(parts) > 1 else None,
        tuple((c, f"{name} {formatting.about(share)}") for name, share, c in parts),
        tuple(bars),
        legend,
        "" if at is None else f"M{ends[at]} 0H{ends[at + 1]}L100 10H0Z",
    )


def _of_memory(held: memory.AtEnd) -> Made:
    def size(count: float) -> str:
        return formatting.quantity(count, "bytes")

    parts = [
        Part(_percent(n / held.limit), _colour(c), _inside(c, n / held.whole, n / held.limit), _ink(c))
        for c, n in held.parts.items()
    ]
    said = ", ".join(f"{looks.look(c).name} {size(n)}" for c, n in held.parts.items())
    of = f"{size(held.whole)} of {size(held.limit)}" if held.limit > held.whole else size(held.whole)
    bars = [Bar("end", tuple(parts), size(held.whole), plain(f"Memory at the end, {of}: {said}", 400))]
    if held.then is not None:
        then, gone = held.then / held.limit, (held.whole - held.then) / held.limit
        less = Part(_percent(gone), "", f"{MINUS}{size(held.whole - held.then)}")
        drawn = (Part(_percent(then), "bar"), less)
        bars.append(Bar("after", drawn, size(held.then), f"Memory after the change, {size(held.then)}"))
    legend = tuple((_colour(c), looks.look(c).name, size(n)) for c, n in held.parts.items())
    title = "What the memory was made of, as counted in an earlier step"
    return Made(title, "Parts of the memory", None, (), tuple(bars), legend, "")


def _ink(category: str) -> str:
    return drawing.inside(looks.look(category).light)


def _bar(name: str, parts: Mapping[str, float], whole: float, label: str, gone: float = 0.0) -> Bar:
    """Draw the parts of a step on the scale of `whole`; what is gone of it is hatched."""
    total = sum(parts.values())
    shares = {category: ns / total for category, ns in parts.items()} if total > 0 else {}
    drawn = [
        Part(_percent(parts[c] / whole), _colour(c), _inside(c, share, parts[c] / whole)) for c, share in shares.items()
    ]
    drawn = [part._replace(ink=_ink(c)) for part, c in zip(drawn, shares, strict=True)]
    if gone > 0:
        drawn.append(Part(_percent(1 - total / whole), "", f"{MINUS}{formatting.duration(gone)}"))
    said = ", ".join(f"{looks.look(c).name} {formatting.about(share)}" for c, share in shares.items())
    took = formatting.duration(whole - gone)
    return Bar(name, tuple(drawn), took, plain(f"{label}, {took}: {said}", 400))


def _from_to(now: float, then: float) -> str:
    told = formatting.duration(now)
    return f"{told} → 0" if then <= 0 < now else told if then == now else first.arrow(now, then)


def _inside(category: str, share: float, width: float) -> str:
    return f"{looks.look(category).name.lower()} {formatting.about(share)}" if width >= WRITTEN else ""


def _colour(category: str) -> str:
    return f"c-{category if category in looks.DRAWN else 'other'}"


def _percent(share: float) -> float:
    return round(100 * min(max(drawing.number(share) or 0.0, 0.0), 1.0), 2)


_HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+(\d+)")
_KINDS = {"-": "del", "+": "ins", " ": "span"}


def edit(diff: str) -> list[tuple[str, int, str]]:
    """Return the lines of an edit that change, and those near: the element that each is, its number and its text.

    Where lines are left out between two, one without a number stands for them.
    """
    hunks: list[list[tuple[str, int, str]]] = []
    old = new = 0
    for line in diff.replace("\r", "").split("\n"):
        if found := _HUNK.match(line):
            hunks.append([])
            old, new = int(found[1]), int(found[2])
        elif hunks and (kind := _KINDS.get(line[:1])):
            hunks[-1].append((kind, old if kind == "del" else new, plain(line[1:].expandtabs(4), 400)))
            old += kind != "ins"
            new += kind != "del"
    shown: list[tuple[str, int, str]] = []
    for hunk in hunks:
        changed = [n for n, line in enumerate(hunk) if line[0] != "span"]
        near = [line for n, line in enumerate(hunk) if any(abs(n - c) <= first.CONTEXT for c in changed)]
        shown += [("span", 0, "…"), *near] if shown else near
    return shown if len(shown) <= MOST_LINES else [*shown[: MOST_LINES - 1], ("span", 0, "…")]


def place(times: float) -> float:
    """Return where a speed-up stands on a list's axis, in percent of it."""
    return _percent((times - 1) / AXIS)
