"""Makes the table of `python -m benchmarks.simulated`: what was found, what was said, and how far off it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

NOTABLE = 0.05  # a finding of so much of the step is one that a reader acts on
NEAR = 0.15  # a prediction further off than this has failed
NEAR_ENOUGH = 0.1  # 95 % of them are to be as near as this
STEP_NEAR = 0.03  # so has a step, or
POINTS_NEAR = 0.03  # a share of computation


ANY = ("*",)  # as `accepted`: whatever is found


@dataclass(frozen=True)
class First:
    """What a report says first: its rule, the step without it, ns, and the lines of the script that it names."""

    rule: str
    predicted_ns: float
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """One job, recorded and diagnosed. Times in ns; shares of the steady step, one a rank; None: not said."""

    name: str
    rule: str  # "": healthy
    seed: int
    form: str
    ranks: int
    true_ns: float
    fixed_ns: float
    whole_loop: bool = False  # the times are of the whole loop, and no shares are compared
    reported_ns: float | None = None
    predicted_ns: float | None = None
    at_most: bool = False  # the saving is a bound: the step may well be longer than predicted
    state: str = ""
    true_computation: tuple[float, ...] = ()
    reported_computation: tuple[float, ...] = ()
    found: tuple[tuple[str, float], ...] = ()  # rule, share; dearest first
    harmless: bool = False  # what the rule is of costs nothing here
    accepted: tuple[str, ...] = ()  # other rules that rightly find the same
    event_ns: int = 0  # that the profiler cost the host for each event
    line: str = ""  # of the script that the fault stands in
    first: First | None = None
    batch_times: float = 0.0  # how many times as large a batch the finding advises; 0: none
    error: str = ""
    why: tuple[str, ...] = field(default=())
    seconds: float = 0.0


def failures(case: Case) -> list[str]:
    """Return what is wrong with one case, in words."""
    said = []
    if case.error:
        said.append(case.error)
    if case.reported_ns is None:
        return [*said, "no step said"]
    if abs(off := case.reported_ns / case.true_ns - 1) > STEP_NEAR:
        said.append(f"step {off:+.1%}")
    if (points := _points(case)) is not None and points > POINTS_NEAR:
        said.append(f"computation off by {100 * points:.0f} points")
    if not case.rule or case.harmless:
        return said + [f"false {rule} {share:.1%}" for rule, share in false_of(case)]
    if case.predicted_ns is None:
        return [*said, f"{case.rule} {case.state}"]
    off = case.predicted_ns / case.fixed_ns - 1
    if off > NEAR or (off < -NEAR and not case.at_most):
        said.append(f"predicted {off:+.1%}")
    return said


def false_of(case: Case) -> list[tuple[str, float]]:
    """Return the findings of a job that has no such fault, or one that costs nothing."""
    notable = [(rule, share) for rule, share in case.found if share >= NOTABLE]
    return [one for one in notable if one[0] == case.rule or not {one[0], *ANY} & set(case.accepted)]


def _points(case: Case) -> float | None:
    """Return how far the worst rank's share of computation is off."""
    pairs = list(zip(case.true_computation, case.reported_computation, strict=False))
    return max((abs(a - b) for a, b in pairs), default=None)


def table(cases: Sequence[Case], accepted: Mapping[str, Sequence[str]], not_simulated: Sequence[str]) -> str:
    """Return the report as Markdown."""
    faults = [c for c in cases if c.rule and not c.harmless]
    parts = ["# Simulated GPU jobs", _overall(cases)]
    for title, chosen in (("Seeds for tuning", 0), ("Held-out seeds", 1)):
        rows = [c for c in faults if c.seed % 2 == chosen]
        if rows:
            parts.append(f"## {title}\n\n{_faults(rows, accepted)}")
    if harmless := [c for c in cases if c.harmless]:
        parts.append(f"## Faults that cost nothing\n\n{_harmless(harmless)}")
    if sound := [c for c in cases if not c.rule]:
        parts.append(f"## Healthy jobs\n\n{_healthy(sound)}")
    if not_simulated:
        rules = ", ".join(f"`{rule}`" for rule in not_simulated)
        parts.append(f"## Not simulated\n\nNo fault is simulated for {rules}.")
    return "\n\n".join(parts) + "\n"


def _overall(cases: Sequence[Case]) -> str:
    """Return the figures that matter, one a line."""
    lines = []
    if faults := [c for c in cases if c.rule and not c.harmless]:
        found = [c for c in faults if c.predicted_ns is not None]
        first = sum(bool(c.found) and c.found[0][0] == c.rule for c in faults)
        names = len({c.name for c in faults})
        lines.append(f"- Found in {len(found)} of {len(faults)} recordings of {names} faults; as the first in {first}.")
        if errors := [abs(r - 1) for c in found if (r := _predicted(c)) is not None]:
            near = sum(e <= NEAR_ENOUGH for e in errors) / len(errors)
            lines.append(f"- The step predicted without the fault, against the simulated fixed job: {_far(errors)};")
            lines.append(f"  within {NEAR_ENOUGH:.0%} in {near:.1%}.")
    if harmless := [c for c in cases if c.harmless]:
        false = sum(bool(false_of(c)) for c in harmless)
        lines.append(
            f"- A false finding of {NOTABLE:.0%} or more in {false} of {len(harmless)} jobs whose fault costs nothing."
        )
    if sound := [c for c in cases if not c.rule]:
        false = sum(any(share >= NOTABLE for _, share in c.found) for c in sound)
        lines.append(f"- A finding of {NOTABLE:.0%} or more in {false} of {len(sound)} random healthy jobs.")
    return "\n".join(lines)


def _faults(cases: Sequence[Case], accepted: Mapping[str, Sequence[str]]) -> str:
    heads: tuple[str, ...] = (
        "fault",
        "rule",
        "found",
        "first",
        "other findings ≥ 5 %",
        "step reported ÷ true",
        "computation off, points",
    )
    heads += ("gain, true", "predicted ÷ fixed")
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for name in dict.fromkeys(c.name for c in cases):
        rows = [c for c in cases if c.name == name]
        rule, n = rows[0].rule, len(rows)
        found = sum(c.predicted_ns is not None for c in rows)
        first = sum(bool(c.found) and c.found[0][0] == rule for c in rows)
        others: dict[str, int] = {}
        for c in rows:
            for other, share in c.found:
                if other != rule and share >= NOTABLE:
                    others[other] = others.get(other, 0) + 1
        listed = ", ".join(f"{o} {k}{' (rightly)' if o in accepted.get(name, ()) else ''}" for o, k in others.items())
        gain = f"{np.median([1 - c.fixed_ns / c.true_ns for c in rows]):.0%}"
        lines.append(
            f"| {name} | `{rule}` | {found}/{n} | {first}/{n} | {listed or '–'} | {_ratios([_step(c) for c in rows])} "
            f"| {_worst([_points(c) for c in rows])} | {gain} | {_ratios([_predicted(c) for c in rows])} |"
        )
    errors = [abs(r - 1) for c in cases if (r := _predicted(c)) is not None]
    if errors:
        far = _far(errors)
        lines.append(f"\nPredicted step against the fixed job's, {len(errors)} of {len(cases)}: {far}.")
    return "\n".join(lines)


def _harmless(cases: Sequence[Case]) -> str:
    lines = ["| fault | rule | found ≥ 5 % | first | step reported ÷ true | gain, true |", "|---|---|---|---|---|---|"]
    for name in dict.fromkeys(c.name for c in cases):
        rows = [c for c in cases if c.name == name]
        found = sum(rows[0].rule in dict(false_of(c)) for c in rows)
        firsts: dict[str, int] = {}
        for c in rows:
            if c.found and c.found[0][1] >= NOTABLE:
                firsts[c.found[0][0]] = firsts.get(c.found[0][0], 0) + 1
        first = ", ".join(f"{rule} {n}" for rule, n in firsts.items()) or "–"
        gain = f"{np.median([1 - c.fixed_ns / c.true_ns for c in rows]):.0%}"
        steps = _ratios([_step(c) for c in rows])
        lines.append(f"| {name} | `{rows[0].rule}` | {found}/{len(rows)} | {first} | {steps} | {gain} |")
    return "\n".join(lines)


def each(cases: Sequence[Case]) -> str:
    """Return a row for each recording, as Markdown: the truth, what is said first, what the fault's rule says."""
    heads: tuple[str, ...] = ("fault", "seed", "µs an event", "true → fixed, ms", "gain", "line", "rule", "÷ fixed")
    heads += ("first", "names", "predicted, ms", "÷ fixed")
    lines = ["## Each recording", "", f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for c in (c for c in cases if c.rule):
        first = c.first or First("nothing", c.reported_ns or np.nan)
        own = f"{c.predicted_ns / c.fixed_ns:.2f}" if c.predicted_ns is not None else c.state
        lines.append(
            f"| {c.name} | {c.seed} | {c.event_ns / 1e3:.1f} | {c.true_ns / 1e6:.2f} → {c.fixed_ns / 1e6:.2f} "
            f"| {1 - c.fixed_ns / c.true_ns:.0%} | {c.line or '–'} | `{c.rule}` | {own} | {first.rule} "
            f"| {', '.join(first.lines[:2]) or '–'} | {first.predicted_ns / 1e6:.2f} "
            f"| {first.predicted_ns / c.fixed_ns:.2f} |"
        )
    return "\n".join(lines)


def _step(case: Case) -> float | None:
    return None if case.reported_ns is None else case.reported_ns / case.true_ns


def _predicted(case: Case) -> float | None:
    return None if case.predicted_ns is None else case.predicted_ns / case.fixed_ns


def _ratios(values: Sequence[float | None]) -> str:
    known = sorted(v for v in values if v is not None)
    return f"{np.median(known):.2f} ({known[0]:.2f} to {known[-1]:.2f})" if known else "–"


def _worst(values: Sequence[float | None]) -> str:
    known = [v for v in values if v is not None]
    return f"{100 * max(known):.0f}" if known else "–"


def _healthy(cases: Sequence[Case]) -> str:
    false: dict[str, list[int]] = {}
    for c in cases:
        for rule, share in c.found:
            if share >= NOTABLE:
                false.setdefault(rule, []).append(c.seed)
    well = sum(not any(share >= NOTABLE for _, share in c.found) for c in cases)
    step = [abs(s - 1) for c in cases if (s := _step(c)) is not None]
    points = [p for c in cases if (p := _points(c)) is not None]
    lines = [f"{well} of {len(cases)} without a finding of 5 % or more."]
    if step:
        lines.append(f"Step reported against true: {_far(step)}.")
    if points:
        lines.append(f"Share of computation against true, in points: {_far(points)}.")
    errors = [c for c in cases if c.error]
    if errors:
        lines.append(f"Errors in {len(errors)}: {errors[0].error}")
    if false:
        lines.append("\n| false finding | jobs | seeds |\n|---|---|---|")
        for rule, seeds in sorted(false.items(), key=lambda one: -len(one[1])):
            few = ", ".join(map(str, seeds[:12])) + (" …" if len(seeds) > 12 else "")
            lines.append(f"| `{rule}` | {len(seeds)} | {few} |")
    return "\n".join(lines)


def _far(errors: Sequence[float]) -> str:
    """Return how far off shares are."""
    high = np.quantile(errors, 0.95)
    return (
        f"off by {np.median(errors):.1%} in the median, {high:.1%} at the 95th percentile, {max(errors):.1%} at worst"
    )
