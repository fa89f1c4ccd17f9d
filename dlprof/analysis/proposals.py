"""What findings save together, where a part of the step that two of them save counts once; and the changes to make.

The changes are in order: findings that one change cures are one, and each is counted after those above it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from dlprof.analysis import idioms
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, by_rank, maybe, needs
from dlprof.analysis.estimate import LEAST_SHARE, Rule
from dlprof.analysis.host.parts import ALL, host_parts
from dlprof.analysis.input.loader import fed_ns
from dlprof.analysis.source.line_shares import RARER
from dlprof.analysis.source.where import changes_numbers
from dlprof.analysis.step.breakdown import breakdown, most_saved_ns, part
from dlprof.analysis.step.savings import own_time
from dlprof.analysis.step.savings import saving as replay
from dlprof.analysis.step.whole_job import loop_step_ns, run_step_ns
from dlprof.analysis.timeline.steps import mean_step_ns, of_step, step_means
from dlprof.result import TIMELESS, Outcome, Proposal, RunPart, Scope, Together
from dlprof.result.tried import Attempt, Gain, Tried

# A part of a saving, ns, and the categories of `time` that it comes out of; a finding with the pieces of its saving.
Piece = tuple[frozenset[str], float]
Found = tuple[Outcome, Sequence[Piece]]


class Basis(Struct, frozen=True):
    """What outcomes are judged by. Its fields are needs: the engine fills them."""

    job: Job = needs(JOB)
    mean_step_ns: Maybe[float] = maybe(mean_step_ns)
    loop_step_ns: Maybe[float] = maybe(loop_step_ns)
    run_step_ns: Maybe[float] = maybe(run_step_ns)
    of_step: Maybe[str] = maybe(of_step)
    fed_ns: Maybe[float] = maybe(fed_ns)
    breakdown: Maybe[Frame] = maybe(breakdown)
    own_time: Maybe[Frame] = maybe(own_time)
    host_parts: Maybe[Frame] = maybe(host_parts)
    step_means: Maybe[Frame] = maybe(step_means)

    def length_ns(self, scope: Scope) -> float:
        """Return what findings of a scope are shares of, for each training step, ns."""
        return (
            self.run_step_ns if scope == "run" else self.loop_step_ns if scope == "job" else self.mean_step_ns
        ).get()

    def longest(self) -> tuple[float, int]:
        """Return the longest mean step of a rank, ns, and which rank's it is."""
        means = self.step_means.get()
        worst = int(means["step_ns"].argmax())
        return float(means["step_ns"].iloc[worst]), int(means["rank"].iloc[worst])

    @property
    def of_one_step(self) -> bool:
        """Whether the figures are of a single steady step, so that nothing shows how much steps vary."""
        means = self.step_means.or_none()
        return means is not None and int(means["steps"].max()) < 2

    def most_ns(self, categories: Collection[str]) -> float:
        """Return the mean steady step's time in some categories, ns; infinity without a breakdown.

        A rule may measure in all steps of the step log, the breakdown in the few traced ones. A report must be
        consistent, so the smaller of the two counts, and the finding says so.
        """
        frame = self.breakdown.or_none() if categories else None
        return math.inf if frame is None else most_saved_ns(frame, categories)


def pieces(rule: Rule, saving_ns: float, within: Mapping[str, float]) -> list[Piece]:
    """Split a saving by categories: those of `within`, and the rest, which any other of the rule's may give."""
    split, left = [], saving_ns
    for category, ns in within.items():
        split.append((frozenset((category,)), min(max(ns, 0.0), left)))
        left -= split[-1][1]
    others = frozenset(rule.saves_from) - within.keys()
    return split if split and left <= 0 else [*split, (others or frozenset(rule.saves_from), left)]


def combined_saving(basis: Basis, found: Sequence[Found], of_host: Collection[str] = ()) -> Together | None:
    """Bound the combined saving of all findings; `of_host`: the rules on the device's waiting for its host.

    Savings from the same categories are at most the removal of these categories. Savings from different ones are at
    most their sum, unless no rank is in all findings: then one may hide what another saves, and only the breakdown
    bounds them. Findings on the host save at most the removal of all that host work. With findings of the whole job, or
    run, the bound is that of the training loop, or run. None where nothing was found, and where the bound is the whole
    step. Findings that the same change removes count as one.
    """
    found = [(o, mine) for o, mine in found if o.scope not in TIMELESS]
    if not found:
        return None
    largest = max(o.saving_ns for o, _ in found)
    inside, job = ([(o, mine) for o, mine in _once(found) if (o.scope == "step") is step] for step in (True, False))
    inside = _host_once(basis, inside, of_host)
    claimed = [piece for _, mine in inside for piece in mine]
    total = sum(_at_most(basis, categories, claims) for categories, claims in _overlapping(claimed))
    if inside and not set(basis.job.ranks).intersection(*(o.ranks for o, _ in inside if o.ranks)):
        total = _removable(basis, frozenset().union(*(categories for categories, _ in claimed)))
    scopes = {o.scope for o, _ in job}
    step = basis.length_ns("run" if "run" in scopes else "job" if scopes else "step")
    total = min(max(total + sum(o.saving_ns for o, _ in job), largest), step)
    if total > max(largest, (1 - LEAST_SHARE) * step):
        return None
    return Together(total, total / step, speedup(total / step))


def _host_once(basis: Basis, found: list[Found], of_host: Collection[str]) -> list[Found]:
    """Make one of the findings on the host: what the replay without all of them gains."""
    hosts = [(o, mine) for o, mine in found if o.id in of_host]
    parts = basis.host_parts.or_none()
    if len(hosts) < 2 or parts is None:
        return found
    gains = by_rank(parts[parts["part"] == ALL], "gain_ns")
    own = basis.own_time.or_none()
    all_ns = math.inf if own is None else replay(own, gains)
    categories = frozenset().union(*(of for _, mine in hosts for of, _ in mine))
    largest = max(hosts, key=lambda one: one[0].saving_ns)[0]
    saving = max(min(sum(o.saving_ns for o, _ in hosts), all_ns), largest.saving_ns)
    return [*(one for one in found if one[0].id not in of_host), (largest, [(categories, saving)])]


def _once(found: Sequence[Found]) -> list[Found]:
    """Leave out a finding if the first change of a larger one sets the same, or is of the same lines."""
    kept: dict[object, Found] = {}
    for n, one in enumerate(sorted(found, key=lambda of: -of[0].saving_ns)):
        sets = frozenset(one[0].changes[0].settings) if one[0].changes else frozenset()
        kept.setdefault(sets or (_lines(one[0]) if one[0].changes else None) or n, one)
    return [*kept.values()]


def _overlapping(pieces: Iterable[Piece]) -> list[tuple[frozenset[str], list[float]]]:
    """Group pieces that have a category in common, directly or through others: categories, savings."""
    groups: list[tuple[frozenset[str], list[float]]] = []
    for categories, saving in pieces:
        claims = [saving]
        for group in [g for g in groups if g[0] & categories]:
            groups.remove(group)
            categories, claims = categories | group[0], group[1] + claims
        groups.append((categories, claims))
    return groups


def _at_most(basis: Basis, categories: frozenset[str], claims: Sequence[float]) -> float:
    """Return the most that findings with these categories can save in total."""
    return sum(claims) if len(claims) < 2 else min(sum(claims), max(_removable(basis, categories), *claims))


def _removable(basis: Basis, categories: frozenset[str]) -> float:
    """Return what the job saves without some categories on every rank, ns; infinity where that is not known."""
    frame, own = basis.breakdown.or_none(), basis.own_time.or_none()
    # Waiting, in communication and bubbles, ends with its cause: a replay of the ranks' own time has none of it.
    if frame is not None and {"communication", "pipeline_bubble"} & categories:
        return most_saved_ns(frame, categories)
    if frame is None or own is None:
        return math.inf
    return replay(own, part(frame, *categories))


def speedup(share: float) -> float:
    """Return how many times faster a step is that is shorter by a share of it."""
    return 1 / (1 - share) if share < 1 else 1e6


# What is left of a gain once the changes above are made must be this share of the step, or the change is left out.
LEAST = 0.005
_MOST = 1e6  # the speed-up where nothing is left

# In whose time the time of a scope lies, too.
_HOLDS: Mapping[Scope, tuple[Scope, ...]] = {"step": ("step",), "job": ("step", "job"), "run": ("step", "job", "run")}


def proposals(
    basis: Basis, found: Sequence[Found], of_host: Collection[str], budget: Sequence[RunPart]
) -> tuple[Proposal, ...]:
    """Return what findings, in their order, propose: cures first, each after those above it; then, each after all of
    the cures, the changes of the training. `of_host`: the rules on the device's waiting for its host.

    A finding without a change proposes none. A gain that those above it take away is no proposal.
    """
    groups: dict[object, list[Found]] = {}
    for one in found:
        if one[0].changes and not one[0].changes[0].informs:
            groups.setdefault(_key(one[0]), []).append(one)
    run_ns = sum(part.ns for part in budget)
    made: list[Proposal] = []
    before: list[Found] = []
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


def _key(outcome: Outcome) -> object:
    """Return what is equal where two findings propose the same: settings, else lines, else the edit, else the words."""
    change = outcome.changes[0]
    settings = frozenset((s.name, s.to) for s in change.settings)
    return settings or _lines(outcome) or change.diff or change.text.partition(RARER)[0]


def _lines(outcome: Outcome) -> tuple[str, str, str] | None:
    """Return what is equal of lines of one function that are known to do the same, and so are changed together."""
    change, where = outcome.changes[0], outcome.where
    idiom = "" if change.diff or not where else idioms.of_advice(change.text)
    return (idiom, where[0].file, where[0].function) if idiom else None


def _proposal(
    basis: Basis,
    before: Sequence[Found],
    group: Sequence[Found],
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


def _gone(basis: Basis, found: Sequence[Found], of_host: Collection[str], whole: float) -> float:
    """Return what findings save together, ns a training step; at most all of it."""
    timed = [one for one in found if one[0].scope not in TIMELESS]
    if len(timed) < 2:
        return min(sum(o.saving_ns for o, _ in timed), whole)
    bound = combined_saving(basis, timed, of_host)
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
        measured = replace(
            _of_start(one, attempt, attempt.measured)
            if attempt.of == "start"
            else _of_step(one, attempt, attempt.measured),
            at_most=False,
            known="losses" if attempt.losses in ("equal", "within") else "tried",
        )
        (done if attempt.verdict in ("gain", "unclear") else useless).append(measured)
    return [*done, *useless]


def _of_step(one: Proposal, attempt: Attempt, gain: Gain) -> Proposal:
    """Return a proposal with the measured gain of a step."""
    before, after = attempt.before_ns or one.before_ns, attempt.after_ns or one.after_ns
    return replace(one, speedup=gain.ratio, low=gain.low, high=gain.high, before_ns=before, after_ns=after)


def _of_start(one: Proposal, attempt: Attempt, gain: Gain) -> Proposal:
    """Return a proposal with what the measured gain of the start makes of the run as it was recorded."""
    whole = one.job_before_ns or 0.0
    start = min(attempt.before_ns or 0.0, whole)
    if not start:
        return replace(one, speedup=gain.ratio, low=gain.low, high=gain.high)
    ratios = (gain.ratio, gain.low, gain.high)
    after, low, high = (None if ratio is None else whole - start * (1 - 1 / ratio) for ratio in ratios)
    assert after is not None
    return replace(
        one,
        speedup=whole / after,
        low=low and whole / low,
        high=high and whole / high,
        after_ns=one.before_ns * after / whole,
        job_after_ns=after,
    )


def _attempt(one: Proposal, attempts: Sequence[Attempt], settings: Mapping[str, object] | None) -> Attempt | None:
    """Return the attempt at a proposal, by its settings or its edit."""
    for attempt in attempts:
        if attempt.edit and attempt.edit == one.change.diff:
            return attempt
        if settings and not attempt.edit and dict(attempt.settings) == dict(settings):
            return attempt
    return None
