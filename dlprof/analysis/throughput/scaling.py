"""What a run tells of how its job scales: its collectives by size, and how far its ranks' own times are apart."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import settings
from dlprof.analysis.communication.bandwidth import transfers
from dlprof.analysis.communication.collectives import NOBODY, window_steps
from dlprof.analysis.communication.overlap import exposed_transfer
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, across_ranks, maybe, needs
from dlprof.analysis.step.savings import own_time
from dlprof.analysis.stragglers.own_time import own_steps
from dlprof.errors import DoesNotApply
from dlprof.result.scale import Scaling, Transfers

# Quantiles of the ranks' own times that are kept. The largest is the mean of the top 1/64.
QUANTILES = 64

# Sizes that differ by less count as one: a quarter of a power of two.
_PER_OCTAVE = 4

# Kinds of collectives, groups and sizes that are kept: those that take longest.
MOST_TRANSFERS = 64


@across_ranks
def scaling(
    transfers: Maybe[Frame] = maybe(transfers),
    window_steps: Maybe[Frame] = maybe(window_steps),
    exposed_transfer: Maybe[pd.Series[float]] = maybe(exposed_transfer),
    own_time: Maybe[Frame] = maybe(own_time),
    own_steps: Maybe[Frame] = maybe(own_steps),
    job: Job = needs(JOB),
) -> Scaling:
    """Return what tells how a job of several ranks scales; raise DoesNotApply of one rank."""
    if job.world_size < 2:
        raise DoesNotApply("one rank")
    frame, exposed, own = transfers.or_none(), exposed_transfer.or_none(), own_time.or_none()
    known = own is not None and bool(own["known"].all())
    uneven, late = _lateness(own_steps.or_none()) if known else ((), ())
    return Scaling(
        transfers=() if frame is None else _transfers(frame, window_steps.get(), job),
        transfer_ns=None if exposed is None or not len(exposed) else float(exposed.mean()),
        wait_ns=float(own["wait_ns"].mean()) if own is not None and known else None,
        uneven_ns=uneven,
        late_ns=late,
    )


def _transfers(frame: pd.DataFrame, window_steps: pd.DataFrame, job: Job) -> tuple[Transfers, ...]:
    """Sum up the collectives of the traced steps by kind, ranks, hosts and size; the longest in total first."""
    steps = max(int(window_steps.groupby("rank").size().max()), 1)
    sized = frame["bytes"] > 0
    octave = np.full(len(frame), -1)
    octave[sized] = np.round(np.log2(frame["bytes"][sized]) * _PER_OCTAVE)
    hosts = {members: _hosts(job, str(members)) for members in frame["members"].unique()}
    by = frame.assign(octave=octave, hosts=frame["members"].map(hosts), n=1.0)
    sums = by.groupby(["collective", "ranks", "hosts", "octave"])[["n", "transfer_ns", "bytes"]].sum().reset_index()
    sums = sums[sums["ranks"] > 1].sort_values("transfer_ns", ascending=False).head(MOST_TRANSFERS)
    return tuple(
        Transfers(
            collective=str(row["collective"]),
            ranks=int(row["ranks"]),
            hosts=int(row["hosts"]),
            # Each of the group's ranks has it.
            count=row["n"] / steps * row["ranks"] / job.world_size,
            transfer_ns=row["transfer_ns"] / row["n"],
            bytes=row["bytes"] / row["n"] if row["octave"] >= 0 else None,
        )
        for row in sums.to_dict("records")
    )


def _hosts(job: Job, members: str) -> int:
    """Return on how many hosts a group lies; 0 where it is not known."""
    if members == NOBODY:
        return 0
    ranks = job.ranks if members == "" else [int(r) for r in members.split(",")]
    return len({settings.host(job, r) for r in ranks if r in job.facts})


def _lateness(own_steps: pd.DataFrame | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return how far the ranks' mean own times are apart, and single steps from what their rank usually takes, ns.

    Where few steps are known, ranks differ in their means by chance alone: that part is taken off.
    """
    if own_steps is None or not len(own_steps):
        return (), ()
    each = own_steps.pivot_table(index="step", columns="rank", values="own_ns").dropna()
    steps, ranks = each.shape
    if ranks < 2 or not steps:
        return (), ()
    # The mean of n values is itself uncertain: deviations from it are too small by √((n − 1) ÷ n).
    away = each.sub(each.mean(axis=1), axis=0).to_numpy() * math.sqrt(ranks / (ranks - 1))
    means = away.mean(axis=0)
    single = (away - means) * math.sqrt(steps / (steps - 1)) if steps > 1 else np.zeros_like(away)
    chance, seen = float(single.var()) / steps, float(means.var())
    means *= math.sqrt(max(1 - chance / seen, 0.0)) if seen > 0 else 0.0
    return _quantiles(means), _quantiles(single.ravel())


def _quantiles(values: NDArray[np.float64]) -> tuple[float, ...]:
    pieces = np.array_split(np.sort(values), min(QUANTILES, len(values)))
    return tuple(float(piece.mean()) for piece in pieces)
