"""The overlap of the script's lines between the phases and the host's Python there, so that it is reported once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, across_ranks, by_rank, maybe, needs
from dlprof.analysis.host.gaps import HOST, host_work
from dlprof.analysis.host.parts import host_gains
from dlprof.analysis.step.breakdown import breakdown, part, part_least
from dlprof.analysis.step.savings import own_time, saving
from dlprof.analysis.step.unused import lines_between
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.errors import DoesNotApply

# A line that takes less of the step is not named (estimate.LEAST_SHARE).
LEAST_SHARE = 0.02


@across_ranks
def between_twice(
    lines_between: Frame = needs(lines_between),
    host_work: Frame = needs(host_work),
    breakdown: Frame = needs(breakdown),
    mean_step_ns: float = needs(mean_step_ns),
    job: Job = needs(JOB),
) -> pd.DataFrame:
    """Return what of the mean steady step two rules see, a row a rank: rank, both_ns, and lines_first (0 or 1).

    The time between the phases in which nothing is computed may be that of notable lines there: both_ns, at the most.
    lines_first, the same in all rows: these lines take longer than all that the host holds up, and keep it. Raises
    DoesNotApply where the job trains on a device: its host computes nothing between the phases.
    """
    if not settings.on_cpu(job):
        raise DoesNotApply("the job trains on a device")
    notable = lines_between[lines_between["ns"] >= LEAST_SHARE * mean_step_ns].groupby("rank")["ns"].sum()
    late = pd.Series(part(breakdown, *HOST), dtype=float)
    whole = host_work.groupby("rank")["ns"].sum()
    outside = host_work[host_work["phase"] == ""].groupby("rank")["ns"].sum()
    share = (outside / whole).reindex(late.index).fillna(0.0)
    lines = notable.reindex(late.index).fillna(0.0)
    both = pd.concat([lines, late * share], axis=1).min(axis=1)
    first = int(lines.max() >= late.max())
    return pd.DataFrame({"rank": late.index, "both_ns": both.to_numpy(), "lines_first": first})


@dataclass(frozen=True)
class HeldUp:
    """What the host holds up of the mean steady step, ns, and what a faster one would gain. `where`: of host_gains.

    `besides`: without the time of the lines between the phases, which keep it.
    """

    where: str
    gain_ns: float
    by_rank_ns: Mapping[int, float]
    least_ns: float  # in every measured step
    besides: bool = False


@across_ranks
def held_up(
    host_gains: Mapping[str, float] = needs(host_gains),
    breakdown: Frame = needs(breakdown),
    between_twice: Maybe[Frame] = maybe(between_twice),
    own_time: Frame = needs(own_time),
) -> HeldUp:
    """Return the larger of what a faster host would gain, and what it holds up on each rank."""
    ((where, gain),) = host_gains.items()
    late, least, shared = part(breakdown, *HOST), part_least(breakdown, *HOST), between_twice.or_none()
    if shared is None or not shared["lines_first"].any():
        return HeldUp(where, gain, late, least)
    both = by_rank(shared, "both_ns")
    left = {rank: max(ns - both.get(rank, 0.0), 0.0) for rank, ns in late.items()}
    return HeldUp(where, saving(own_time, left), left, max(least - max(both.values()), 0.0), besides=True)
