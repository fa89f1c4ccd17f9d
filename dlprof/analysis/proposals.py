"""The changes to make, in order: findings that one change cures are one, and each is counted after those above it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from dlprof.analysis.source.where import changes_numbers
from dlprof.analysis.step.breakdown import part
from dlprof.analysis.together import Basis, Piece, together
from dlprof.result import TIMELESS, Change, Outcome, Proposal, RunPart, Scope
from dlprof.result.tried import Attempt, Tried

# What is left of a gain once the changes above are made must be this share of the step, or the change is left out.
LEAST = 0.005
_MOST = 1e6  # the speed-up where nothing is left

# In whose time the time of a scope lies, too.
_HOLDS: Mapping[Scope, tuple[Scope, ...]] = {"step": ("step",), "job": ("step", "job"), "run": ("step", "job", "run")}


def proposals(
    basis: Basis,
    found: Sequence[tuple[Outcome, Sequence[Piece]]],
    of_host: Collection[str],
    budget: Sequence[RunPart],
) -> tuple[Proposal, ...]:
    """Return what findings, in their order, propose: cures first, each after those above it; then, each after all of
    the cures, the changes of the training. `of_host`: the rules on the device's waiting for its host.

    A finding without a change proposes none. A gain that those above it take away is no proposal.
    """
    groups: dict[object, list[tuple[Outcome, Sequence[Piece]]]] = {}
    for one in found:
        if one[0].changes and not one[0].changes[0].informs:
            groups.setdefault(_key(one[0].changes[0]), []).append(one)
    run_ns = sum(part.ns for part in budget)
    made: list[Proposal] = []
    before: list[tuple[Outcome, Sequence[Piece]]] = []
    taken: dict[str, float] = {}
    gained: dict[Scope, float] = {}
    cures = [group for group in groups.values() if not group[0][0].training]
    for group in [*cures, *(group for group in groups.values() if group[0][0].training)]:
        proposal = _proposal(basis, before, group, of_host, run_ns, taken, gained)
        if proposal is not None:
            made.append(proposal)
            if not proposal.training:
                before = [*before, *group]
                gained[proposal.scope] = gained.get(proposal.scope, 0.0) + proposal.before_ns - proposal.after_ns
                taken = {of: taken.get(of, 0.0) + proposal.takes.get(of, 0.0) for of in {*taken, *proposal.takes}}
    return tuple(made)


def _key(change: Change) -> object:
    """Return what is equal where two findings propose the same: settings, else the line, else the words."""
    settings = frozenset((s.name, s.to) for s in change.settings)
    return settings or change.diff or change.text


def _proposal(
    basis: Basis,
    before: Sequence[tuple[Outcome, Sequence[Piece]]],
    group: Sequence[tuple[Outcome, Sequence[Piece]]],
    of_host: Collection[str],
    run_ns: float,
    taken: Mapping[str, float],
    gained: Mapping[Scope, float],
) -> Proposal | None:
    first = max((o for o, _ in group if o.scope not in TIMELESS), key=lambda o: o.saving_ns, default=group[0][0])
    change, ids = group[0][0].changes[0], tuple(o.id for o, _ in group)
    change = change if change.numerics else replace(change, numerics=changes_numbers(change))
    if first.scope in TIMELESS:
        step = basis.mean_step_ns.or_none() or 0.0
        return Proposal(change, ids, first.scope, step, step, 1.0)
    holds = _HOLDS[first.scope]
    so_far = [one for one in before if one[0].scope in holds]
    whole = basis.length_ns(first.scope)
    gain = _gone(basis, [*so_far, *group], of_host, whole) - _gone(basis, so_far, of_host, whole)
    start = whole - sum(gained.get(scope, 0.0) for scope in holds)
    takes: dict[str, float] = {}
    if first.scope == "step":
        takes = _takes(basis, next(mine for o, mine in group if o is first), gain)
        # A change that made a kind of work shorter made what a later one saves of it shorter, in proportion.
        takes = {of: ns * (1 - min(taken.get(of, 0.0) / _mean(basis, of), 1.0)) for of, ns in takes.items()}
        gain = min(sum(takes.values()), gain) if takes else gain
    if gain < LEAST * whole or start <= 0:
        return None
    after = start - min(gain, start)
    low = high = None
    if not first.at_most and 0 < first.error_ns < after:
        error = first.error_ns * min(gain / first.saving_ns, 1.0)
        low, high = start / (after + error), start / (after - error)
    job: tuple[float | None, float | None] = (None, None)
    per_step = basis.run_step_ns.or_none()
    if run_ns and per_step:
        steps = run_ns / per_step
        made = sum(gained.values())
        job = run_ns - steps * made, run_ns - steps * min(made + gain, per_step)
    return Proposal(
        change,
        ids,
        first.scope,
        start,
        after,
        min(start / after, _MOST) if after else _MOST,
        low,
        high,
        first.at_most,
        *job,
        takes=takes,
    )


def _gone(
    basis: Basis, found: Sequence[tuple[Outcome, Sequence[Piece]]], of_host: Collection[str], whole: float
) -> float:
    """Return what findings save together, ns a training step; at most all of it."""
    timed = [(o, list(mine)) for o, mine in found if o.scope not in TIMELESS]
    if len(timed) < 2:
        return min(sum(o.saving_ns for o, _ in timed), whole)
    bound = together(basis, timed, of_host)
    return min(bound.saving_ns if bound else sum(o.saving_ns for o, _ in timed), whole)


def _takes(basis: Basis, mine: Sequence[Piece], gain: float) -> dict[str, float]:
    """Divide a gain of the step over the categories that it comes out of, ns; {}: not known."""
    whole = sum(ns for _, ns in mine)
    if basis.breakdown.or_none() is None or whole <= 0:
        return {}
    taken: dict[str, float] = {}
    for categories, ns in mine:
        there = {name: mean for name in categories if (mean := _mean(basis, name)) > 0}
        total = sum(there.values())
        for category, of in there.items() if total else ():
            taken[category] = taken.get(category, 0.0) + gain * ns / whole * of / total
    return taken


def _mean(basis: Basis, category: str) -> float:
    """Return the ranks' mean time of a category in the mean steady step, ns."""
    return float(np.mean(list(part(basis.breakdown.get(), category).values())))


def with_tried(
    proposals: Sequence[Proposal], tried: Tried, settings: Sequence[Mapping[str, object] | None]
) -> list[Proposal]:
    """Return the proposals with the measured gain of those that were tried; those that gained nothing come last.

    `settings`: of each, as an attempt holds them; None: --set does not reach it.
    """
    done: list[Proposal] = []
    useless: list[Proposal] = []
    for one, its in zip(proposals, settings, strict=True):
        attempt = _attempt(one, tried.attempts, its)
        if attempt is None or attempt.measured is None:
            done.append(one)
            continue
        gain = attempt.measured
        measured = replace(
            one,
            speedup=gain.ratio,
            low=gain.low,
            high=gain.high,
            at_most=False,
            before_ns=attempt.before_ns or one.before_ns,
            after_ns=attempt.after_ns or one.after_ns,
            known="losses" if attempt.losses in ("equal", "within") else "tried",
        )
        (done if attempt.verdict in ("gain", "unclear") else useless).append(measured)
    return [*done, *useless]


def _attempt(one: Proposal, attempts: Sequence[Attempt], settings: Mapping[str, object] | None) -> Attempt | None:
    """Return the attempt at a proposal, by its settings or its edit."""
    for attempt in attempts:
        if attempt.edit and attempt.edit == one.change.diff:
            return attempt
        if settings and not attempt.edit and dict(attempt.settings) == dict(settings):
            return attempt
    return None
