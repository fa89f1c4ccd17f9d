"""The first screen of the page: bars of the job, of a step and of a step after the change, edits, rows of changes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dlprof.plain import plain
from dlprof.report import formatting, looks, verdict
from dlprof.report.figures import drawing
from dlprof.result import TIMELESS, Outcome, Proposal, Result
from dlprof.units import MINUS

WRITTEN = 0.09  # of a bar: a part as wide has its name inside
VISIBLE = 0.002  # of a bar: less than a pixel is left out
CONTEXT = 2  # lines of an edit around what changes
MOST_LINES = 16  # of an edit


@dataclass(frozen=True)
class Part:
    """A part of a bar: its width in percent, its colour (a custom property of the page), and what is written in it."""

    width: float
    colour: str
    text: str = ""
    ink: str = ""


@dataclass(frozen=True)
class Bar:
    """One bar; `label` says what it shows."""

    name: str
    parts: tuple[Part, ...]
    total: str
    label: str


@dataclass(frozen=True)
class Made:
    """What the time is made of: the job, a step, and the step after the first change on the scale of the step."""

    job: Bar | None
    job_legend: tuple[tuple[str, str], ...]  # colour, and words with the share
    steps: tuple[Bar, ...]
    legend: tuple[tuple[str, str, str], ...]  # colour, name, and time now and after
    zoom: str = ""  # where in the job's bar its training stands: an SVG path from it to the step's bar


@dataclass(frozen=True)
class Mark:
    """The interval of a speed-up on an axis from 1 to 1.5 times, in percent of it."""

    low: float
    at: float
    high: float


# Parts of the job's bar, of which parts of the run each is, and their colours.
_JOB: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("start-up", ("launch", "setup", "first_batch"), "--c-epoch"),
    ("training", ("warmup", "steady", "traced", "epoch_ends"), "--bar"),
    ("validation", ("validation",), "--c-validation"),
    ("other steps", ("other",), "--c-other"),
    ("standing still", ("stalled", "suspended"), "--c-suspended"),
    ("the end", ("end",), "--c-waiting"),
)


def made(result: Result) -> Made | None:
    """Return the bars of a result; None without steps."""
    window = result.window
    if window is None or not result.time:
        return None
    step = window.step_ns
    now = {name: share * step for name, share in formatting.mean_shares(result.time).items()}
    now = {name: now[name] for name in formatting.ordered(now) if now[name] > 0}
    first = next(iter(result.changes), None)
    takes = first.takes if first and first.scope == "step" and not first.training else {}
    after = {name: max(ns - takes.get(name, 0.0), 0.0) for name, ns in now.items()}
    each = formatting.unit(result)
    bars = [_bar(each, now, step, f"{each} now, {formatting.duration(step)}")]
    if takes and first:
        gone = f"{MINUS}{formatting.duration(first.before_ns - first.after_ns)}"
        bars.append(_bar("after", after, step, f"after the change, {formatting.duration(first.after_ns)}", gone))
    legend = [
        (f"--c-{name if name in looks.DRAWN else 'other'}", looks.look(name).name, _from_to(ns, after[name]))
        for name, ns in now.items()
        if ns >= VISIBLE * step
    ]
    job, zoom = _job(result)
    return Made(job, _job_legend(result), tuple(bars), tuple(legend), zoom)


def _bar(name: str, parts: Mapping[str, float], whole: float, label: str, gone: str = "") -> Bar:
    """Draw the parts of a step; what it is shorter by than the whole is hatched."""
    total = sum(parts.values())
    drawn = []
    for category, ns in parts.items():
        look, share = looks.look(category), ns / whole
        own = f"{look.name.lower()} {formatting.about(ns / total)}" if share >= WRITTEN else ""
        colour = f"--c-{category if category in looks.DRAWN else 'other'}"
        drawn.append(Part(_percent(share), colour, own, drawing.inside(look.light)))
    if gone and whole > total:
        drawn.append(Part(_percent(1 - total / whole), "", gone))
    said = ", ".join(f"{looks.look(c).name} {formatting.about(ns / total)}" for c, ns in parts.items())
    return Bar(name, tuple(drawn), formatting.duration(total), plain(f"A {label}: {said}", 400))


def _from_to(now: float, after: float) -> str:
    told = formatting.duration(now)
    return told if after == now else f"{told} → {formatting.duration(after) if after > 0 else '0'}"


def _percent(share: float) -> float:
    return round(100 * min(max(share, 0.0), 1.0), 2)


def _shares(result: Result) -> list[tuple[str, float, str]]:
    """Return the parts of the job that are seen in its bar, in the order of time, with name, share and colour."""
    share = {part.part: part.share for part in result.budget}
    parts = [(name, sum(share.get(one, 0.0) for one in of), colour) for name, of, colour in _JOB]
    return [part for part in parts if part[1] >= VISIBLE]


def _job(result: Result) -> tuple[Bar | None, str]:
    parts = _shares(result)
    if len(parts) < 2:
        return None, ""
    total = formatting.duration(sum(part.ns for part in result.budget))
    edges = [_percent(sum(share for _, share, _ in parts[:n])) for n in range(len(parts) + 1)]
    at = next((n for n, part in enumerate(parts) if part[0] == "training"), None)
    zoom = "" if at is None else f"M{edges[at]} 0H{edges[at + 1]}L100 10H0Z"
    bar = Bar("job", tuple(Part(_percent(share), colour) for _, share, colour in parts), total, f"The job, {total}")
    return bar, zoom


def _job_legend(result: Result) -> tuple[tuple[str, str], ...]:
    return tuple((colour, f"{name} {formatting.about(share)}") for name, share, colour in _shares(result))


def mark(change: Proposal) -> Mark | None:
    """Return where a change's speed-up and its interval stand on the axis of a list; None: the interval is not known."""
    if change.low is None or change.high is None or change.scope in TIMELESS:
        return None
    low, at, high = (_percent((times - 1) / 0.5) for times in (change.low, change.speedup, change.high))
    return Mark(low, at, high)


_HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+(\d+)")


def edit(diff: str) -> list[tuple[str, int, str]]:
    """Return the lines of an edit with the element that each is, its number and its text; a cut is a line without."""
    lines = [line for hunk in _hunks(diff) for line in [("span", 0, ""), *_near(hunk)]][1:]
    return lines if len(lines) <= MOST_LINES else [*lines[: MOST_LINES - 1], ("span", 0, "…")]


def _hunks(diff: str) -> Iterator[list[tuple[str, int, str]]]:
    hunk: list[tuple[str, int, str]] = []
    old = new = 0
    for line in diff.replace("\r", "").split("\n"):
        if found := _HUNK.match(line):
            if hunk:
                yield hunk
            hunk, old, new = [], int(found[1]), int(found[2])
        elif old and line[:1] in ("-", "+", " "):
            kind = {"-": "del", "+": "ins"}.get(line[0], "span")
            hunk.append((kind, old if kind == "del" else new, plain(line[1:].expandtabs(4), 400)))
            old += kind != "ins"
            new += kind != "del"
    if hunk:
        yield hunk


def _near(hunk: Sequence[tuple[str, int, str]]) -> list[tuple[str, int, str]]:
    """Return what changes in a part of an edit, and CONTEXT lines around it."""
    changed = [n for n, line in enumerate(hunk) if line[0] != "span"] or [0]
    return list(hunk[max(changed[0] - CONTEXT, 0) : changed[-1] + CONTEXT + 1])


def numbers(result: Result) -> dict[str, int]:
    """Return the number of the change that cures each finding; without changes the findings' own numbers."""
    of = {finding: n for n, change in reversed(list(enumerate(result.changes, 1))) for finding in change.findings}
    return of or {o.id: n for n, o in enumerate(result.found, 1)}


@dataclass(frozen=True)
class Row:
    """A change in a list."""

    number: int
    text: str
    why: str
    href: str
    known: str
    gain: str
    interval: str
    then: str
    mark: Mark | None


@dataclass(frozen=True)
class Screen:
    """The first screen in words. `state`: "change", "healthy", "died" or "open" (neither is known)."""

    state: str
    title: str
    run: tuple[str, ...]
    kind: str = ""
    cures: str = ""
    href: str = ""
    gain: str = ""
    faster: str = "faster"
    interval: str = ""
    facts: tuple[str, ...] = ()
    known: str = ""
    note: str = ""
    at: str = ""
    edit: tuple[tuple[str, int, str], ...] = ()
    commands: tuple[tuple[str, str], ...] = ()
    notices: tuple[str, ...] = ()
    then: tuple[Row, ...] = ()
    counted: str = ""
    apart: tuple[Row, ...] = ()
    healthy: str = ""
    checks: str = ""
    unknown: str = ""
    unlock: str = ""
    perfetto: str = ""


def screen(result: Result, keys: Mapping[str, str], perfetto: bool) -> Screen:
    diagnosis, gain, _ = verdict.headline(result)
    states = formatting.by_state(result)
    w = result.window
    run = [formatting.devices(result)]
    if w:
        run.append(f"{formatting.duration(w.step_ns)} a {formatting.unit(result)}")
        run += [formatting.throughput(w.throughput)] if w.throughput else []
        run += [f"{formatting.percent(w.mfu)} of the device's peak"] if w.mfu else []
    found = {o.id: o for o in result.outcomes}
    rows = [_row(n, c, keys, found) for n, c in enumerate(result.changes, 1)]
    path = shlex.quote(result.run.path)
    common = dict(
        run=tuple(run),
        notices=tuple(verdict.notices(result)),
        apart=tuple(r for r, c in zip(rows, result.changes) if c.training),
        healthy=" · ".join(o.title for o in states["clear"][:8]),
        checks=f"{len(states['clear'])} checks",
        unknown=f"{len(states['not_measured'])} checks" if states["not_measured"] else "",
        perfetto=f"the whole job: dlprof export {path} --perfetto trace.json.gz" if perfetto else "",
    )
    first = next((c for c in result.changes if not c.training), None)
    if first is None:
        return Screen("healthy" if not result.found and states["clear"] else "open", diagnosis, kind="Healthy" if not result.found and states["clear"] else "", note=gain, **common)
    cause = found[first.findings[0]]
    place = first.change.at or next((p for p in cause.where if p.line), None)
    return Screen(
        "died" if first.scope == "failure" else "change",
        first.change.text,
        kind="The change that gains most",
        cures=f"cures {len(first.findings)} of {len(result.found)} findings" if len(result.found) > 1 else "",
        href=rows[0].href,
        gain=rows[0].gain,
        interval=rows[0].interval,
        facts=(f"A step: {rows[0].then}",),
        known=first.known,
        note=cause.sure,
        at=" ".join(filter(None, (place and f"{place.file}:{place.line}", diagnosis))),
        edit=tuple(edit(first.change.diff)),
        commands=((f"dlprof try {path} --change 1", "Runs the job with the change and without, in turn."),),
        then=tuple(r for r, c in zip(rows, result.changes) if not c.training)[1:],
        counted="each counted after those above it",
        **common,
    )


def _row(number: int, c: Proposal, keys: Mapping[str, str], found: Mapping[str, Outcome]) -> Row:
    interval = "" if c.low is None or c.high is None else f"{c.low:.2f} to {c.high:.2f}"
    then = f"{formatting.duration(c.before_ns)} → {formatting.duration(c.after_ns)}"
    why = found[c.findings[0]].title if c.findings else ""
    href = "#finding-" + keys.get(c.findings[0], "1")
    return Row(number, c.change.text, why, href, c.known, f"{'≤ ' if c.at_most else ''}{formatting.times(c.speedup)}", interval, then, mark(c))
