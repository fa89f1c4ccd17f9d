"""Which ranks of a large job are alike, and which are not: in what, and by how much.

Ranks that hold the same stages of their pipelines are to do the same, or all ranks where there are none. Of those, the
ones that spend on every part of the step what their median does, within noise, are one group. Of the others, as many as
make a group of their own are one (two kinds of GPU); the few that are left stand out. Waiting for others is left out: a
rank that waits is not the one that is unlike the others.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, across_ranks, maybe, needs
from dlprof.analysis.pipeline.pipes import pipelines
from dlprof.analysis.step.breakdown import breakdown
from dlprof.analysis.step.savings import own_time
from dlprof.analysis.stragglers.late_ranks import own_parts, stages_of
from dlprof.errors import DoesNotApply
from dlprof.result import CATEGORIES
from dlprof.result.figures import MANY, Member

# A rank differs from the others if it is this far from the median: a share of the step, and standard deviations. These
# are estimated from the median absolute deviation, which is 1/1.4826 standard deviations of normal values.
NOTABLE_SHARE = 0.02
SIGMAS = 6.0
_OF_DEVIATION = 1.4826

# The fewest ranks, and the least share of those that should be alike, that make a group of their own.
LEAST_RANKS = 8
LEAST_SHARE = 0.05
MOST_GROUPS = 4  # of those that should be alike

# The categories in which a rank waits for others.
_WAITING = ("pipeline_bubble",)


@across_ranks
def members(
    breakdown: Frame = needs(breakdown),
    own_time: Frame = needs(own_time),
    pipelines: Maybe[Frame] = maybe(pipelines),
    job: Job = needs(JOB),
) -> tuple[Member, ...]:
    """Return which ranks are alike, and in what the others differ; raise DoesNotApply with fewer than MANY ranks."""
    if len(job.ranks) < MANY:
        raise DoesNotApply(f"fewer than {MANY} ranks are looked at one by one")
    parts = own_parts(breakdown, own_time)
    step = float(parts.sum(axis=1).median())
    parts = parts[[c for c in CATEGORIES if c not in _WAITING]]
    stages = stages_of(pipelines.or_none())["stages"].reindex(parts.index)
    found: list[Member] = []
    for stage, mine in parts.groupby(stages.fillna(""), sort=True):
        name = f"stage {stage}" if stage else "all ranks" if stages.isna().all() else "no stage"
        found += _members(job, name, mine, step)
    return tuple(sorted(found, key=lambda member: member.rank))


def _members(job: Job, name: str, parts: pd.DataFrame, step: float) -> list[Member]:
    """Return those of some ranks that should be alike."""
    enough = max(LEAST_RANKS, LEAST_SHARE * len(parts))
    found: list[Member] = []
    left, usual = parts, parts.median()
    for number in range(MOST_GROUPS):
        middle, far = _far(left, step)
        like = left.index[~far]
        if len(like) < enough:
            break
        if not number:
            group, usual = name, middle
        else:
            other = str((middle - usual).abs().idxmax())
            group = f"{name}, {'more' if middle[other] > usual[other] else 'less'} {other.replace('_', ' ')}"
        found += [Member(int(rank), settings.host(job, int(rank)), group) for rank in like]
        left = left[far]
        if len(left) < enough:
            break
    differ = left - usual
    for rank in left.index:
        # More of something is a reason, less of it a consequence.
        most = str(
            (differ.loc[rank] if differ.loc[rank].max() > NOTABLE_SHARE * step else differ.loc[rank].abs()).idxmax()
        )
        found.append(
            Member(
                int(rank), settings.host(job, int(rank)), name, most, float(left.loc[rank, most]), float(usual[most])
            )
        )
    return found


def _far(parts: pd.DataFrame, step: float) -> tuple[pd.Series[float], pd.Series[bool]]:
    """Return the median of ranks, and which are far from it in any part of the step."""
    middle = parts.median()
    away = (parts - middle).abs()
    # A late rank exchanges for less time: a consequence.
    away["communication"] = (parts["communication"] - middle["communication"]).clip(lower=0.0)
    near = np.maximum(NOTABLE_SHARE * step, SIGMAS * _OF_DEVIATION * away.median())
    return middle, (away > near).any(axis=1)


def members_of(members: Maybe[tuple[Member, ...]] = maybe(members)) -> tuple[Member, ...]:
    """Return them for the result; () where the ranks are shown one by one, or it is not known."""
    return members.or_none() or ()
