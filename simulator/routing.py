"""Where a mixture of experts sends its tokens: how many of each rank's go to each rank's experts, in each step."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from simulator.job import Job

# Steps differ: after so many they begin again, so that few programs are made.
VARIANTS = 6


@lru_cache(256)
def sent(job: Job, module: str, step: int) -> tuple[tuple[int, ...], ...]:
    """Return the tokens that each rank sends to each, rank by rank, of one layer in one step; none are lost.

    `Job.routing` are the ranks' mean shares, of which each layer and step has its own, some per cent apart.
    """
    rng = np.random.default_rng((job.seed, 83, step % VARIANTS, int(module.removeprefix("block"))))
    shares = np.array(job.routing) * rng.lognormal(0.0, job.routing_spread, job.ranks)
    parts = []
    for rank in range(job.ranks):
        mine = shares * rng.lognormal(0.0, 0.02, job.ranks)
        ends = np.rint(np.cumsum(mine / mine.sum()) * job.tokens_of(rank)).astype(int)
        parts.append(tuple(int(n) for n in np.diff(ends, prepend=0)))
    return tuple(parts)


def given(job: Job, rank: int, module: str, step: int) -> tuple[int, ...]:
    """Return the tokens that a rank sends to each rank's experts."""
    return sent(job, module, step)[rank]


def got(job: Job, rank: int, module: str, step: int) -> tuple[int, ...]:
    """Return the tokens that a rank's experts get from each rank."""
    return tuple(row[rank] for row in sent(job, module, step))
