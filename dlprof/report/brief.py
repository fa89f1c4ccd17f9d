"""The first screen for programs and agents: Markdown of at most 2 kB, or JSON of at most 8 kB with a schema.

What does not fit is left out from the end, and counted. result.json has everything.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from dlprof.plain import NBSP, plain
from dlprof.report import first, formatting, verdict
from dlprof.result import Change, Outcome, Place, Proposal, Result
from dlprof.result.stored import plain as data_of
from dlprof.result.stored import schema_of

FORMAT = 1
MOST_MARKDOWN, MOST_JSON = 2_000, 8_000
_SENTENCE, _LONG, _LINES = 200, 400, 8


class At(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the script's."""

    file: str
    line: int = 0
    function: str = ""


class Cure(msgspec.Struct, frozen=True, omit_defaults=True):
    """A finding, and its first change.

    `speedup`: of the step, how many times faster; a bound where `at_most`, else off by `margin` at most. `set`: what
    `dlprof try RUN --set` takes, empty where no setting reaches. `numerics`, `training`: the job then computes other
    numbers, or trains otherwise. `diff`: the edit's lines.
    """

    rule: str
    title: str
    saving_ms: float
    speedup: float
    change: str
    at_most: bool = False
    margin: float = 0.0
    at: At | None = None
    set: dict[str, str] = {}
    numerics: bool = False
    training: bool = False
    diff: tuple[str, ...] = ()


class Step(msgspec.Struct, frozen=True, omit_defaults=True):
    """A change to make, counted after those above it; `dlprof try RUN --change NUMBER` tries it.

    `findings`: the rules that it cures. `speedup`: of what `scope` names, nine of ten times from `low` to `high`; a
    bound where `at_most`. `known`: "predicted", "tried", or "losses" (tried, and the losses are the same).
    """

    number: int
    change: str
    findings: tuple[str, ...]
    scope: str
    speedup: float
    known: str
    low: float | None = None
    high: float | None = None
    at_most: bool = False
    at: At | None = None
    set: dict[str, str] = {}
    numerics: bool = False
    training: bool = False
    diff: tuple[str, ...] = ()


class Brief(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a report says first. `time`: shares of the mean step, rank by rank the mean.

    `changes`: what to do, in this order. `more`: findings left out; `more_changes`: changes.
    """

    format: int
    run: str
    devices: str
    steps: str
    step_ms: float | None
    verdict: str
    gain: str = ""
    time: dict[str, float] = {}
    changes: tuple[Step, ...] = ()
    findings: tuple[Cure, ...] = ()
    together: float | None = None
    more: int = 0
    more_changes: int = 0
    warnings: tuple[str, ...] = ()
    clear: int = 0
    not_measured: tuple[str, ...] = ()
    next: str = ""


def brief(result: Result, path: str, named: first.Named, most: int = MOST_JSON) -> Brief:
    """Return what a report on `path` says first, in at most so many bytes of JSON."""
    diagnosis, gain, _ = verdict.headline(result)
    states, window = formatting.by_state(result), result.window
    tries = named if result.run.command else _nothing  # traces have no command that could be run again
    every = tuple(_cure(o, tries) for o in (*result.found, *result.if_training_may_change))
    steps = tuple(_step(number, one, tries) for number, one in enumerate(result.changes, 1))
    whole = Brief(
        format=FORMAT,
        run=plain(path, 300),
        devices=_text(formatting.devices(result)),
        steps=_text(formatting.steps(result)),
        step_ms=_number(window.step_ns / 1e6) if window else None,
        verdict=_text(diagnosis, _LONG),
        gain=_text(gain),
        time={
            plain(name, 40): _number(share)
            for name, share in formatting.mean_shares(result.time).items()
            if share > 0.001
        },
        changes=steps,
        findings=every,
        together=_number(result.together.speedup) if result.together and formatting.together(result) else None,
        warnings=tuple(_text(line) for line in verdict.notices(result)[:5]),
        clear=len(states["clear"]),
        not_measured=tuple(plain(o.id, 40) for o in states["not_measured"]),
        next=_next(result),
    )
    shorter: list[dict[str, Any]] = [{"findings": every[:n], "more": len(every) - n} for n in range(len(every))][::-1]
    shorter += [{"not_measured": (), "warnings": ()}]
    shorter += [{"changes": steps[:n], "more_changes": len(steps) - n} for n in range(len(steps))][::-1]
    for left in shorter:
        if len(to_json(whole)) <= most:
            break
        whole = msgspec.structs.replace(whole, **left)
    return whole


def to_json(said: Brief) -> bytes:
    """Return it as JSON."""
    return msgspec.json.format(msgspec.json.encode(data_of(said)), indent=1)


def schema() -> dict[str, Any]:
    """Return the JSON schema of it; dlprof/brief.schema.json holds it, for other programs."""
    made = schema_of(Brief)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"dlprof brief {FORMAT}", **made}


def markdown(result: Result, path: str, named: first.Named) -> str:
    """Return the first screen of a report on `path` as plain Markdown of at most MOST_MARKDOWN bytes."""
    said = brief(result, path, named)
    name = _text(formatting.name(result))
    pieces = [f"**{said.verdict}** {said.gain}".strip(), f"`{name}` · {said.devices} · {said.steps}"]
    tries = bool(result.run.command)
    findings = [_change(one, said.run, tries) for one in said.changes]
    cured = {name for one in said.changes for name in one.findings}
    others = [one for one in said.findings if one.rule not in cured]
    findings += [_finding(n, one, said.run) for n, one in enumerate(others, len(findings) + 1)]
    closing = [f"> {line}" for line in said.warnings[:2]]
    closing += [f"Together: at most {said.together:.2f} × faster."] if said.together else []
    closing += [said.next] if said.next else []
    shown = len(findings)
    while True:
        more = len(findings) - shown + said.more + said.more_changes
        rest = [f"{more} more: `dlprof report {said.run}`."] if more else []
        text = "\n\n".join([*pieces, *findings[:shown], *rest, *closing]) + "\n"
        if len(text.encode()) <= MOST_MARKDOWN or not (shown or closing):
            return text
        if shown > 1 or not closing:
            shown -= 1
        else:
            closing = closing[:-1]


def _speed(one: Cure | Step) -> str:
    return f"{'at most ' if one.at_most else ''}{one.speedup:.2f} ×" if one.speedup > 1 else ""


def _place(one: Cure | Step) -> str:
    return f", at `{one.at.file}:{one.at.line}`" if one.at and one.at.line else ""


def _edit(one: Cure | Step) -> list[str]:
    return ["   ```diff", *(f"   {line}" for line in one.diff), "   ```"] if one.diff else []


def _change(one: Step, run: str, tries: bool) -> str:
    between = f" ({one.low:.2f} to {one.high:.2f})" if one.low is not None and one.high is not None else ""
    known = {"losses": "tried, same losses"}.get(one.known, one.known)
    lines = [f"{one.number}. **{', '.join(one.findings)}** {_speed(one)}{between}, {known}{_place(one)}"]
    lines += [f"   → {one.change}", *_edit(one)]
    return "\n".join(
        [*lines, f"   `dlprof try {run} --change {one.number}`"] if tries and (one.set or one.diff) else lines
    )


def _finding(number: int, one: Cure, run: str) -> str:
    margin = f" ± {one.margin:.2f}" if one.margin and not one.at_most else ""
    lines = [f"{number}. **{one.rule}** {_speed(one)}{margin}: {one.title}{_place(one)}", f"   → {one.change}"]
    lines += _edit(one)
    if one.set:
        words = " ".join(f"{name}={value}" for name, value in one.set.items())
        lines.append(f"   `dlprof try {run} --set '{words}'`")
    return "\n".join(lines)


def _cure(outcome: Outcome, named: first.Named) -> Cure:
    change = outcome.changes[0] if outcome.changes else Change("")
    place = change.at or next((p for p in outcome.where if p.line), None)
    margin = formatting.margin(outcome).partition(NBSP)[2]
    return Cure(
        rule=plain(outcome.id, 40),
        title=_text(outcome.title),
        saving_ms=_number(outcome.saving_ns / 1e6),
        speedup=_number(min(outcome.speedup, 1e3)),
        change=_text(change.text, _LONG),
        at_most=outcome.at_most,
        margin=float(margin) if margin else 0.0,
        set=dict(named(change) or {}),
        numerics=change.numerics,
        training=outcome.training,
        **_edited(change, place),
    )


def _step(number: int, one: Proposal, named: first.Named) -> Step:
    low, high = (None if bound is None else _number(min(bound, 1e3)) for bound in (one.low, one.high))
    return Step(
        number=number,
        change=_text(one.change.text, _LONG),
        findings=tuple(plain(name, 40) for name in one.findings),
        scope=one.scope,
        speedup=_number(min(one.speedup, 1e3)),
        known=one.known,
        low=low,
        high=high,
        at_most=one.at_most,
        set=dict(named(one.change) or {}),
        numerics=one.change.numerics,
        training=one.training,
        **_edited(one.change, one.change.at),
    )


def _edited(change: Change, place: Place | None) -> dict[str, Any]:
    at = At(plain(place.file, 120), place.line, plain(place.function, 80)) if place else None
    return {"at": at, "diff": tuple(plain(line, 120) for line in formatting.edits(change, _LINES))}


def _nothing(_change: Change) -> None:
    """Say that a change cannot be tried."""


def _next(result: Result) -> str:
    """Say what would tell most more: what most rules lack that were not measured."""
    more = first.unlock(result) if result.window is not None else None
    if more is None:
        return ""
    return (
        f"{formatting.counted(more.checks, 'more answer')} {more.words}."
        if more.checks
        else f"`{more.option}` {more.words}."
    )


def _number(value: float) -> float:
    return round(value, 4) if math.isfinite(value) else 0.0


def _text(text: str, most: int = _SENTENCE) -> str:
    return plain(text, most).replace(NBSP, " ")
