"""The first screen, as data for the terminal and the page: what to change, what that gains, and how to prove it.

Its order: the change that gains most with its line and the command that tries it, the step before and after, the run,
the next changes, those of the training, and what was looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from dlprof.plain import NBSP, plain
from dlprof.report import formatting, verdict
from dlprof.report.formatting import counted, duration, percent, times
from dlprof.result import BY_LINE, TIMELESS, Change, Outcome, Proposal, Result, is_line

# What makes a change from outside, as words for `dlprof try --set`; None: nothing does.
Named = Callable[[Change], Mapping[str, str] | None]

# How a gain is known: a dot, and in words.
KNOWN: Mapping[str, tuple[str, str]] = {
    "predicted": ("○", "predicted"),
    "tried": ("◐", "tried"),
    "losses": ("●", "tried, same losses"),
}
CONTEXT = 2  # lines around an edit
_WORTH = 1.02  # a measured gain below is none, as in `dlprof try`
_HEADLINE, _LEAST_WORDS = 160, 15

# A change in words, by one of its settings; {to}: its new value.
_DO: Mapping[str, str] = {
    "autocast_dtype": "Compute in {to}: torch.autocast around the forward pass",
    "batch_size": "Use batches of {to}",
    "foreach": "Let the optimizer update all parameters at once (foreach={to})",
    "fused": "Use the fused optimizer (fused={to})",
    "mode": 'Compile the model: torch.compile(mode="{to}")',
    "memory_format": "Use {to} for the model and its images",
    "num_threads": "Let each rank compute with {to} threads (OMP_NUM_THREADS={to})",
    "padding": "Pad each batch to its own longest row only",
}
# What begins with one of these is no sentence yet.
_OPENINGS = {
    "a ": "Use ",
    "an ": "Use ",
    "one ": "Use ",
    "more ": "Use ",
    "fewer ": "Use ",
    "half ": "Send ",
    "no ": "Avoid ",
}

# What lets rules judge that did not: an option of `dlprof wrap` ("": none), in words, and what their reasons say then.
_UNLOCKS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("--memory", "with --memory", ("--memory",)),
    ("--shapes", "with --shapes", ("--shapes",)),
    ("", "without --no-trace", ("--no-trace",)),
    ("", "without --no-sample", ("--no-sample",)),
    ("", "in a longer run", ("record longer", "record more", "too few", "too seldom", "fewer than", "the job ended")),
)
# Findings of what Python does, for which it is worth to know how long each line takes.
_BY_LINE = ("costly_line", "host_bound", "input_wait", "step_python")


class Row(Struct, frozen=True):
    """A further change: its number for `dlprof try --change`, 0: it cannot be tried by number."""

    number: int
    text: str
    cures: str
    proposal: Proposal

    @property
    def dot(self) -> str:
        """How its gain is known."""
        return KNOWN[self.proposal.known][0]


class First(Struct, frozen=True):
    """The first screen. `state`: a change is known, only a cause is, nothing is wrong, or the job died.

    `lead`: the change that gains most, None without one. `place`: its line and what stands there; `diff`: its edit,
    with lines around it; `detail`: the change in full where there is none. `command`: what proves it. "", (): none.
    """

    state: Literal["change", "cause", "healthy", "died"]
    headline: str
    gain: str
    known: str
    why: str
    place: str = ""
    detail: str = ""
    diff: tuple[str, ...] = ()
    command: str = ""
    lead: Proposal | None = None
    job: str = ""
    rows: tuple[Row, ...] = ()
    training: tuple[Row, ...] = ()
    useless: tuple[Row, ...] = ()
    looked_at: str = ""


def first(result: Result, run: str, named: Named) -> First:
    """Return the first screen of a result; `run` is how a command names it."""
    diagnosis, gain, _ = verdict.headline(result)
    by_id = {o.id: o for o in result.outcomes}
    rows = [_row(n, one) for n, one in enumerate(result.changes, 1)]
    gains = [row for row in rows if not row.proposal.training and not _is_useless(row.proposal)]
    more: dict[str, Any] = {
        "training": tuple(row for row in rows if row.proposal.training),
        "useless": tuple(row for row in rows if _is_useless(row.proposal)),
        "job": job(result),
        "looked_at": looked_at(result),
    }
    died = bool(result.found) and result.found[0].scope == "failure"
    if not gains:
        state: Literal["cause", "healthy", "died"] = "died" if died else "cause" if result.found else "healthy"
        place = _place(result.found[0]) if result.found else ""
        known = gain if result.found or not formatting.by_state(result)["clear"] or _is_disturbed(result) else ""
        return First(state, diagnosis, known, "", "", place, **more)
    lead = gains[0].proposal
    outcome = by_id[lead.findings[0]]
    return First(
        "died" if died else "change",
        f"{imperative(lead.change)}.",
        gain_of(lead),
        KNOWN[lead.known][1] if lead.scope not in TIMELESS else "",
        diagnosis,
        _place(outcome),
        "" if lead.change.diff else plain(lead.change.text, 400).replace("`", ""),
        edit(lead.change),
        command(lead, gains[0].number, result, run, named),
        lead,
        rows=tuple(gains[1:]),
        **more,
    )


def _is_disturbed(result: Result) -> bool:
    return result.foreign_load is not None and result.foreign_load.disturbs


def imperative(change: Change) -> str:
    """Return a change as one short sentence, without its full stop: "Set num_workers=4"."""
    values = {s.name: s.to for s in change.settings if s.to is not None and not is_line(s.name)}
    known = next((name for name in _DO if name in values), None)
    if known is not None:
        return plain(_DO[known].format(to=values[known]), _HEADLINE)
    if values:
        return plain("Set " + ", ".join(f"{name}={value}" for name, value in values.items()), _HEADLINE)
    text = plain(change.text, 400)
    opening = next((do for word, do in _OPENINGS.items() if text.startswith(word)), "")
    if text.startswith("`"):
        opening = "Put " if text.startswith("`with ") else "Use "
    text = f"{opening}{text.removeprefix('no ')}" if opening else f"{text[:1].upper()}{text[1:]}"
    for end in (" (http", ": ", "; ", " ("):
        short = text.partition(end)[0]
        text = short if len(short) > _LEAST_WORDS else text
    return plain(text, _HEADLINE).replace("`", "").rstrip(".:, ")


def gain_of(one: Proposal) -> str:
    """Return what a change gains: "1.41 × faster (1.33 to 1.49): a step 22.1 → 15.7 ms, the run 41 → 33 min"."""
    if one.scope in TIMELESS:
        peak = one.change.peak_bytes
        if one.scope == "failure" and peak:
            needed, then = (formatting.quantity(bytes_, "bytes") for bytes_ in peak)
            return f"The job then needs about {then} of memory instead of {needed}."
        return (
            "The job cannot go on without it." if one.scope == "failure" else "It saves no time, but may save the job."
        )
    step = f"a step {arrow(one.before_ns, one.after_ns)}" if one.scope == "step" else ""
    run = ""
    if one.job_before_ns and one.job_after_ns and one.job_before_ns - one.job_after_ns > 0.01 * one.job_before_ns:
        run = f"the run {arrow(one.job_before_ns, one.job_after_ns)}"
    both = ", ".join(filter(None, (step, run)))
    numbers = "; the job then computes other numbers" if one.change.numerics else ""
    return f"{speed(one)}{f': {both}' if both else ''}{numbers}"


def speed(one: Proposal) -> str:
    """Return how many times faster, and how that is known: "1.41 × faster (1.33 to 1.49, predicted)"."""
    known = KNOWN[one.known][1]
    if one.at_most:
        bound = f"at most {times(one.speedup)} faster" if one.speedup <= 10 else f"{times(one.speedup)} faster at best"
        return f"{bound} ({known})"
    within = between(one)
    return f"{times(one.speedup)} faster ({f'{within}, ' if within else ''}{known})"


def factor(one: Proposal) -> str:
    """Return how many times faster, in the fewest signs: "1.41 ×", "≤ 1.41 ×"."""
    return f"{'≤ ' if one.at_most and one.speedup <= 10 else ''}{times(one.speedup)}"


def between(one: Proposal) -> str:
    """Return the range of a speed-up, "1.33 to 1.49"; "" where it is not known."""
    if one.low is None or one.high is None or one.speedup > 10 or not math.isfinite(one.high):
        return ""
    return f"{one.low:.2f} to {one.high:.2f}"


def arrow(before: float, after: float) -> str:
    """Write two durations, the first without its unit if both have the same: "22.1 → 15.7 ms"."""
    one, other = duration(before), duration(after)
    number, _, unit = one.partition(NBSP)
    return f"{number if other.endswith(NBSP + unit) else one} → {other}"


def _row(number: int, one: Proposal) -> Row:
    cures = f"cures {counted(len(one.findings), 'finding')}" if len(one.findings) > 1 else ""
    return Row(number, imperative(one.change), cures, one)


def _is_useless(one: Proposal) -> bool:
    """Return whether a change was tried and gained nothing."""
    return one.known != "predicted" and one.speedup < _WORTH


def _place(outcome: Outcome) -> str:
    change = outcome.changes[0] if outcome.changes else None
    place = (change.at if change else None) or next((p for p in outcome.where if p.line), None)
    return formatting.where(place) if place else ""


def edit(change: Change) -> tuple[str, ...]:
    """Return the lines of one edit of a change's diff, with CONTEXT lines around it: the first that takes a line out,
    else the first; an import comes last.
    """
    lines = [line for line in change.diff.split("\n") if line[:4] not in ("--- ", "+++ ") and line[:1] != "\\"]
    changed = [n for n, line in enumerate(lines) if line[:1] in ("-", "+")]
    if not changed:
        return ()
    changed = [n for n in changed if not lines[n].startswith(("+import ", "+from "))] or changed
    # What takes a line out says more than a function that is put in above.
    taken = next((n for n in changed if lines[n].startswith("-")), changed[0])
    begins = max((n for n, line in enumerate(lines[:taken]) if line.startswith("@@")), default=0)
    changed = [n for n in changed if n > begins]
    hunk = next((n for n, line in enumerate(lines) if line.startswith("@@") and n > changed[0]), len(lines))
    last = max(n for n in changed if n < hunk)
    shown = lines[max(changed[0] - CONTEXT, 0) : min(last + CONTEXT + 1, hunk)]
    while not shown[-1].strip():
        shown.pop()
    return tuple(plain(line.expandtabs(4).rstrip("\r"), 400) for line in shown if not line.startswith("@@"))


def command(one: Proposal, number: int, result: Result, run: str, named: Named) -> str:
    """Return the command that proves a change: that tries it, or compares the run with the next; "" for traces."""
    if not result.run.command or one.scope == "failure":
        return ""
    if one.change.diff or named(one.change):
        return f"dlprof try {run} --change {number}"
    return f"dlprof compare {run} NEW"


# The parts of the run in the fewest words.
_PARTS = {
    "launch": "start-up",
    "setup": "set-up",
    "first_batch": "first batch",
    "warmup": "warm-up",
    "steady": "training",
    "traced": "traced steps",
    "epoch_ends": "ends of epochs",
    "validation": "validation",
    "other": "other",
    "stalled": "standing still",
    "suspended": "suspended",
    "end": "the end",
}


def job(result: Result) -> str:
    """Return the run's time and its parts: "41 min: training 71, validation 9, start-up 12 %"; "": not known."""
    total = sum(part.ns for part in result.budget)
    largest = sorted((p for p in result.budget if p.share >= 0.005), key=lambda part: -part.share)
    if not largest:
        return ""
    each = ", ".join(f"{_PARTS.get(p.part, plain(p.part, 20))} {100 * p.share:.0f}" for p in largest[:5])
    return f"{duration(total)}: {each}{NBSP}%"


def looked_at(result: Result) -> str:
    """Return what was looked at and found healthy, and which option would let most of the rest be known."""
    states = formatting.by_state(result)
    said = []
    if states["clear"]:
        beside = " (beside other programs)" if _is_disturbed(result) else ""
        said.append(f"Healthy: {counted(len(states['clear']), 'check')}{beside}.")
    if missing := len(states["not_measured"]):
        more = unlock(result)
        words = f"; {more.checks} of them {more.words}" if more and more.checks else ""
        said.append(f"Not measured: {missing}{words}.")
        if more and not more.checks:
            said.append(f"{more.option} {more.words}.")
    if states["error"]:
        said.append(f"Errors: {', '.join(plain(o.id, 40) for o in states['error'])}.")
    return " ".join(said)


class Unlock(Struct, frozen=True):
    """What would let a recording say more: an option of `dlprof wrap` ("": none), in words, and how many more checks.

    No checks: it says more about what was found.
    """

    option: str
    words: str
    checks: int


def unlock(result: Result) -> Unlock | None:
    """Return what would let a recording like this one say most more; None: nothing is known to."""
    lacking = [o.why for o in result.outcomes if o.state == "not_measured"]
    if not result.run.command:
        checks = sum("dlprof wrap" in why for why in lacking)
        return Unlock("", "if dlprof records the job", checks) if checks else None
    lead = result.found[0] if result.found else None
    if lead and lead.id in _BY_LINE and not any(change.diff for change in lead.changes) and not _has_lines(result):
        return Unlock("--lines auto", "would time each line of the hottest functions", 0)
    found = [
        Unlock(option, words, sum(any(sign in why for sign in signs) for why in lacking))
        for option, words, signs in _UNLOCKS
    ]
    most = max(found, key=lambda one: one.checks)
    return most if most.checks else None


def _has_lines(result: Result) -> bool:
    return any(panel.title.startswith(BY_LINE) for panel in result.panels)


def after(result: Result, one: Proposal) -> dict[str, float]:
    """Return the parts of the mean step with a change, ns by category, as the mean of the ranks; {}: not known."""
    if not one.takes or one.scope != "step":
        return {}
    takes = {name: ns for name, ns in one.takes.items() if math.isfinite(ns)}
    return {name: max(ns - takes.get(name, 0.0), 0.0) for name, ns in formatting.mean_ns(result.time).items()}


def summary(result: Result) -> str:
    """Return what was measured: "train.py · 1 × NVIDIA H200 · 22.1 ms a step · 1,448 samples/s"."""
    return f"{formatting.name(result)} · {formatting.devices(result)} · {formatting.steps(result)}"


def next_rows(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Return rows as (text, gain, steps): ("Use the fused optimizer", "○ 1.11 × (1.04 to 1.18)", "15.7 → 14.1 ms")."""
    shown: list[tuple[str, str, str]] = []
    for row in rows:
        one = row.proposal
        if one.scope in TIMELESS:
            shown.append((row.text, one.scope, ""))
            continue
        steps = arrow(one.before_ns, one.after_ns) if one.scope == "step" else f"{percent(1 - 1 / one.speedup)} less"
        text = f"{row.text}: {row.cures}" if row.cures else row.text
        within = f"{NBSP}({between(one)})" if between(one) else ""
        shown.append((text, f"{row.dot} {factor(one)}{within}", steps))
    return shown
