"""Several runs in a row, each with one change more: what each change gave, from the first run to the last.

Runs are compared by the samples, or tokens, that they train on in a second; by their steps where these do the same work
and nobody counted. A run that did other work, on other devices or in another script, has no place in the row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePosixPath

from msgspec import Struct

from dlprof.analysis.compare.comparison import Comparison, Setting, Verdict, compare, differing
from dlprof.result import Result
from dlprof.units import count

# Settings that are named first as what a run changed; facts of the others follow from these, or are all different.
_FIRST = ("Overrides", "Loader", "Precision", "Optimizer", "Pipeline", "Environment")
_COMMAND = ("Job", "command")
_NAMED = 3
_UNSAID = ("class", "parameters", "parameter bytes", "trainable parameters", "last bucket bytes", "modules")


class Step(Struct, frozen=True):
    """How many times as fast one run is as another, by samples a second; `noise`: its standard error, None: unknown."""

    ratio: float
    noise: float | None
    verdict: Verdict


class Rung(Struct, frozen=True):
    """A run in the row: what it changed against the one before, and how much faster it is than that and the first."""

    name: str
    result: Result
    changes: tuple[str, ...]
    before: Step | None = None  # None: it is the first
    first: Step | None = None


class Ladder(Struct, frozen=True):
    """The runs in their order, what they are compared by (`unit`: samples, tokens, steps), what was left out, and why.

    `doubts`: what a reader must know before trusting a run.
    """

    unit: str
    rungs: tuple[Rung, ...]
    left_out: tuple[tuple[str, str], ...]
    doubts: tuple[str, ...]


def ladder(runs: Sequence[tuple[str, Result]], left_out: Iterable[tuple[str, str]] = ()) -> Ladder:
    """Return a ladder of named results, in their order. `left_out`: names of those that could not be read, and why."""
    out, rungs, doubts = list(left_out), list[Rung](), dict[str, None]()
    for name, result in runs:
        if result.window is None:
            out.append((name, "no steady step was recorded"))
            continue
        if not rungs:
            rungs.append(Rung(name, result, ()))
            continue
        first, last = rungs[0].result, rungs[-1].result
        why = other_job(first, result)
        of_first, of_last = compare(first, result), compare(last, result)
        why = why or next((unlike(c) for c in (of_first, of_last) if unlike(c)), "")
        if why:
            out.append((name, why))
            continue
        doubts.update(dict.fromkeys(_of_run(name, result)))
        rungs.append(Rung(name, result, _changes(last, result), _step(of_last), _step(of_first)))
    if rungs:
        doubts = dict.fromkeys((*_of_run(rungs[0].name, rungs[0].result), *doubts))
    return Ladder(_unit(rungs), tuple(rungs), tuple(out), tuple(doubts))


def script_of(result: Result) -> str:
    """Return the name of the script that a run ran, "" where no command was recorded."""
    words = [w for w in result.run.command if w.endswith(".py")]
    return PurePosixPath(words[0].replace("\\", "/")).name if words else ""


def other_job(a: Result, b: Result) -> str:
    """Return why run B is not another one of A's job; "" where it may be one."""
    scripts = script_of(a), script_of(b)
    if all(scripts) and scripts[0] != scripts[1]:
        return f"it ran another script, {scripts[1]}, not {scripts[0]}"
    if a.run.device and b.run.device and a.run.device != b.run.device:
        return f"it ran on {b.run.device}, not on {a.run.device}"
    return "its trace has no step markers" if b.window and b.window.unit == "trace" else ""


def unlike(c: Comparison) -> str:
    """Return why two runs cannot be compared; "" where they can."""
    if c.step is None:
        return c.not_compared[0] if c.not_compared else "its steps cannot be compared"
    if c.other_work and c.rates is None:
        return f"its steps do other work, and how many samples they are of is not known: {c.other_work[0]}"
    return ""


def _step(c: Comparison) -> Step:
    if c.rates is not None:
        return Step(c.rates.ratio, c.rates.noise, c.rates.verdict)
    d = c.step
    assert d is not None
    assert d.a_ns is not None
    assert d.b_ns is not None
    ratio = d.a_ns / d.b_ns
    return Step(ratio, None if d.noise_ns is None else d.noise_ns / d.b_ns * ratio, d.verdict)


def _unit(rungs: Sequence[Rung]) -> str:
    known = [t for r in rungs if r.result.window and (t := r.result.window.throughput)]
    if not rungs or len(known) < len(rungs):
        return "steps"
    return "samples" if all(t.samples_per_s for t in known) else "tokens"


def _of_run(name: str, result: Result) -> Iterator[str]:
    """Yield what a reader must know before trusting a run."""
    load = result.foreign_load
    if load is not None and load.disturbs:
        yield f"{name}: programs outside the job used the cores that it would have used"
    if result.run.missing_ranks:
        yield f"{name}: {count(len(result.run.missing_ranks), 'rank')} of {result.run.world_size} is missing"
    if result.window and result.window.source == "trace":
        yield f"{name}: only traced steps are known, which the profiler slows"


def _changes(a: Result, b: Result) -> tuple[str, ...]:
    """Name the settings in which a run differs from the one before: those that somebody set come first."""
    chosen, measured = differing(a, b)
    differ = [*chosen, *(s for s in measured if s.section == "Overrides")]
    named = [_written(s) for section in _FIRST for s in differ if s.section == section and s.name not in _UNSAID]
    if a.run.world_size != b.run.world_size:
        named.insert(0, f"{count(a.run.world_size, 'rank')} → {b.run.world_size}")
    words = next((s for s in differ if (s.section, s.name) == _COMMAND), None)
    if words is not None and not all(part.isdecimal() for part in (words.a, words.b)):
        named.insert(0, " → ".join(filter(None, (words.a, words.b or "without it"))))
    if not named:
        named = [_written(s) for s in differ if s.name not in _UNSAID]
    return (*named[:_NAMED], *([count(len(named) - _NAMED, "more setting")] if len(named) > _NAMED else []))


def _written(s: Setting) -> str:
    return (
        f"{s.name} {s.a or 'none'} → {s.b or 'none'}" if s.section != "Overrides" else f"{s.name}: {s.b or 'not set'}"
    )
