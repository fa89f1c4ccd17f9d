"""What all findings of a run save together: what two of them claim is there once."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from dlprof.analysis.engine import Job, Maybe
from dlprof.analysis.estimate import LEAST_SHARE, Rule
from dlprof.analysis.step.breakdown import part, room
from dlprof.analysis.step.savings import saving as replay
from dlprof.result import Outcome, Together

# A part of a saving, ns, and the categories of `time` that it comes out of.
Piece = tuple[frozenset[str], float]


@dataclass(frozen=True)
class Basis:
    """What outcomes are judged by, each as far as it is known. Its fields are needs: the engine fills them."""

    job: Job
    mean_step_ns: Maybe[float]
    loop_step_ns: Maybe[float]
    of_step: Maybe[str]
    fed_ns: Maybe[float]
    breakdown: Maybe[pd.DataFrame]
    own_time: Maybe[pd.DataFrame]

    def most_ns(self, categories: Collection[str]) -> float:
        """Return what the mean steady step has of some categories, ns; infinity where it is not divided.

        A rule and `time` may measure in different steps: the step log's all, the trace's few. What a report shows must
        agree with itself, so the smaller of the two counts, and the reader is told.
        """
        frame = self.breakdown.or_none() if categories else None
        return math.inf if frame is None else room(frame, categories)


def pieces(rule: Rule, saving_ns: float, within: Mapping[str, float]) -> list[Piece]:
    """Split a saving by what it comes out of: single categories, and the rest out of any other of the rule's."""
    split, left = [], saving_ns
    for category, ns in within.items():
        split.append((frozenset((category,)), min(max(ns, 0.0), left)))
        left -= split[-1][1]
    others = frozenset(rule.saves_from) - within.keys()
    return split if split and left <= 0 else [*split, (others or frozenset(rule.saves_from), left)]


def together(basis: Basis, found: Sequence[tuple[Outcome, list[Piece]]]) -> Together | None:
    """Bound what all findings save together: what two of them claim is there once, and the step has no more of it.

    What they save from the same categories is at most what all of these would give; from different ones at most their
    sum, but where no rank has a part in all of them: then each hides what another would save, and only the step's own
    parts bound them. With findings of the whole job it is the training loop's. None where nothing was found, and
    where the bound is the whole step: that tells nothing.
    """
    found = [(o, mine) for o, mine in found if o.scope != "risk"]
    if not found:
        return None
    dearest = max(o.saving_ns for o, _ in found)
    inside, job = ([(o, mine) for o, mine in found if o.scope == scope] for scope in ("step", "job"))
    claimed = [piece for _, mine in inside for piece in mine]
    total = sum(_at_most(basis, categories, claims) for categories, claims in _overlapping(claimed))
    if inside and not set(basis.job.ranks).intersection(*(o.ranks for o, _ in inside if o.ranks)):
        total = _removable(basis, frozenset().union(*(categories for categories, _ in claimed)))
    step = basis.loop_step_ns.get() if job else basis.mean_step_ns.get()
    total = min(max(total + sum(o.saving_ns for o, _ in job), dearest), step)
    if total > max(dearest, (1 - LEAST_SHARE) * step):
        return None
    return Together(total, total / step, speedup(total / step))


def _overlapping(pieces: Iterable[Piece]) -> list[tuple[frozenset[str], list[float]]]:
    """Gather pieces that have a category in common, directly or through others: categories, savings."""
    groups: list[tuple[frozenset[str], list[float]]] = []
    for categories, saving in pieces:
        claims = [saving]
        for group in [g for g in groups if g[0] & categories]:
            groups.remove(group)
            categories, claims = categories | group[0], group[1] + claims
        groups.append((categories, claims))
    return groups


def _at_most(basis: Basis, categories: frozenset[str], claims: Sequence[float]) -> float:
    """Return what findings save together that have these categories in common."""
    return sum(claims) if len(claims) < 2 else min(sum(claims), max(_removable(basis, categories), *claims))


def _removable(basis: Basis, categories: frozenset[str]) -> float:
    """Return what the job saves without all of some categories, on every rank, ns; infinity where that is not known."""
    frame, own = basis.breakdown.or_none(), basis.own_time.or_none()
    # What is waiting among communication and bubbles goes with its cause: a replay of the ranks' own time tells nothing
    # of it.
    if frame is not None and {"communication", "pipeline_bubble"} & categories:
        return room(frame, categories)
    if frame is None or own is None:
        return math.inf
    return replay(own, part(frame, *categories))


def speedup(share: float) -> float:
    """Return how many times faster a step is that is shorter by a share of it."""
    return 1 / (1 - share) if share < 1 else 1e6
