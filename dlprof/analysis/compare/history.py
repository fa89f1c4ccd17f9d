"""Runs of one script over time: their throughput and findings, the moments at which it changed, and what did then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dlprof.analysis.compare.ladder import Ladder, Rung, ladder, script_of
from dlprof.result import Result

# Runs of the same job on different days differ by a few hundredths: from here on it is called a change.
WORTH = 0.05


@dataclass(frozen=True)
class Recorded:
    """A run of the history: when it started (Unix time, ns; None: not known)."""

    name: str
    result: Result
    start_ns: int | None


@dataclass(frozen=True)
class Moment:
    """A run that is faster or slower than the one before it, and the findings that came and went with it."""

    rung: Rung
    came: tuple[str, ...]
    went: tuple[str, ...]


@dataclass(frozen=True)
class History:
    """The runs of one script in order of time, and the moments at which they changed."""

    script: str
    ladder: Ladder
    starts_ns: tuple[int | None, ...]  # of the ladder's runs
    moments: tuple[Moment, ...]


def history(runs: Sequence[Recorded], broken: Sequence[tuple[str, str]] = (), script: str = "") -> History:
    """Return the history of a script, by default of the one with most runs. `broken`: what could not be read, and why.

    Runs of other scripts, on other devices or of other work than the first one's are left out, with the reason.
    """
    chosen = script or next(iter(Counter(script_of(r.result) for r in runs).most_common(1)), ("", 0))[0]
    mine = [r for r in runs if script_of(r.result) == chosen]
    left = [(r.name, f"it ran {script_of(r.result) or 'a command without a script'}") for r in runs if r not in mine]
    mine.sort(key=lambda r: (r.start_ns is None, r.start_ns or 0, r.name))
    made = ladder([(r.name, r.result) for r in mine], (*broken, *left))
    starts = {r.name: r.start_ns for r in mine}
    moments = []
    for before, rung in zip(made.rungs, made.rungs[1:], strict=False):
        step = rung.before
        if step is not None and step.verdict != "noise" and abs(step.ratio - 1) >= WORTH:
            a, b = ({o.id for o in r.result.found} for r in (before, rung))
            moments.append(Moment(rung, tuple(sorted(b - a)), tuple(sorted(a - b))))
    return History(chosen, made, tuple(starts.get(r.name) for r in made.rungs), tuple(moments))
