"""What waiting for other ranks in collectives costs a rank: idle time, and the transfers that it exposes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import intervals as iv
from dlprof.analysis.communication.collectives import Nanoseconds, exposed, window_steps
from dlprof.analysis.communication.matching import matched
from dlprof.analysis.engine import JOB, Frame, Job, across_ranks, needs

_NONE = np.empty(0, dtype=np.int64)


@across_ranks
def bare_waits(matched: Frame = needs(matched), exposed: Frame = needs(exposed)) -> pd.DataFrame:
    """Return the rows of `matched` with by, the rank that came last to the same collective, and waited_ns, the part of
    wait_ns in which its rank computed nothing; where waits overlap, the earliest has the time.
    """
    rank, begin = matched["rank"].to_numpy(), matched["start_ns"].to_numpy()
    bare = exposed_between(exposed, rank, begin, begin + matched["wait_ns"].to_numpy())
    return matched.assign(waited_ns=bare, by=rank[culprits(matched)])


@across_ranks
def waiting(
    matched: Frame = needs(matched), exposed: Frame = needs(exposed), job: Job = needs(JOB)
) -> dict[int, iv.Intervals]:
    """Return when, in the steady traced steps, each rank waited for another and computed nothing meanwhile."""
    waited = _by_rank(matched.assign(end_ns=matched["start_ns"] + matched["wait_ns"]))
    bare = _by_rank(exposed)
    return {r: iv.intersect(waited.get(r, iv.EMPTY), bare.get(r, iv.EMPTY)) for r in job.ranks}


@across_ranks
def exposed_waits(bare_waits: Frame = needs(bare_waits), exposed: Frame = needs(exposed)) -> Nanoseconds:
    """Return what waiting cost the rank of each row of `matched`, ns: waiting, and the transfers that it exposed.

    Waiting counts where the rank computed nothing; where waits overlap, the earliest has the time, so that they add up.
    A transfer that is exposed here, but hidden by computation on the last rank to come, is exposed only because this
    rank is early. It counts as far as this rank computed while it waited: that would have hidden it.
    """
    rank, begin, end = (bare_waits[name].to_numpy() for name in ("rank", "start_ns", "end_ns"))
    until, waited = begin + bare_waits["wait_ns"].to_numpy(), bare_waits["waited_ns"].to_numpy()
    start, stop = _apart(rank, begin, until)
    bare = exposed_between(exposed, rank, until, end)
    rows = bare_waits[["rank", "step"]].assign(
        waited=waited, hidden=stop - start - waited, opened=np.maximum(bare - bare[culprits(bare_waits)], 0)
    )
    of_step = rows.groupby(["rank", "step"]).sum().join(_of_steps(exposed), how="left")
    left = of_step["exposed_ns"] - of_step["waited"]
    most = of_step["hidden"].where(of_step["hidden"] < left, left).clip(lower=0)
    share = (most / of_step["opened"].replace(0, np.nan)).clip(upper=1.0).fillna(0.0)
    part = share.reindex(pd.MultiIndex.from_frame(rows[["rank", "step"]])).to_numpy()
    found: Nanoseconds = waited + np.rint(rows["opened"].to_numpy() * part).astype(np.int64)
    return found


def culprits(pairs: pd.DataFrame) -> Nanoseconds:
    """Return for each matched row the place of its culprit's: the row of the rank that came last to the collective."""
    instance = pairs["instance"].to_numpy()
    row_of = np.zeros(instance.max() + 1, dtype=np.int64)
    at = np.flatnonzero(pairs["last"])[::-1]  # of several, the first rank
    row_of[instance[at]] = at
    found: Nanoseconds = row_of[instance]
    return found


def places(values: pd.Series[Any] | NDArray[Any]) -> dict[Any, NDArray[np.int64]]:
    """Return the places of each value, in their order."""
    by = pd.Series(values).groupby(np.asarray(values), sort=False)
    return {value: np.asarray(at, dtype=np.int64) for value, at in by.indices.items()}


def exposed_between(exposed: pd.DataFrame, ranks: Nanoseconds, begin: Nanoseconds, end: Nanoseconds) -> Nanoseconds:
    """Return how much exposed communication lies in each of some ranks' times, ns; an overlap is the earliest's."""
    start, stop = _apart(ranks, begin, end)
    found, rows = np.zeros(len(ranks), dtype=np.int64), places(ranks)
    for rank, intervals in _by_rank(exposed).items():
        mine = rows.get(rank, _NONE)
        found[mine] = iv.within(intervals, start[mine], stop[mine])
    return found


def _apart(ranks: Nanoseconds, begin: Nanoseconds, end: Nanoseconds) -> tuple[Nanoseconds, Nanoseconds]:
    """Return the starts and ends of some ranks' times, each begun where all before it of the same rank have ended."""
    start = begin.copy()
    for at in places(ranks).values():
        at = at[np.argsort(begin[at], kind="stable")]
        start[at[1:]] = np.maximum(begin[at[1:]], np.maximum.accumulate(end[at])[:-1])
    return start, np.maximum(start, end)


def _of_steps(exposed: pd.DataFrame) -> pd.Series[int]:
    """Return the exposed communication of each rank and step, ns."""
    return (
        exposed.assign(exposed_ns=exposed["end_ns"] - exposed["start_ns"]).groupby(["rank", "step"])["exposed_ns"].sum()
    )


def _by_rank(frame: pd.DataFrame) -> dict[int, iv.Intervals]:
    """Return the time that each rank's rows cover."""
    return {
        int(str(r)): iv.union(of["start_ns"].to_numpy(), of["end_ns"].to_numpy()) for r, of in frame.groupby("rank")
    }


@across_ranks
def waits(
    matched: Frame = needs(matched),
    exposed_waits: Nanoseconds = needs(exposed_waits),
    window_steps: Frame = needs(window_steps),
    exposed: Frame = needs(exposed),
) -> pd.DataFrame:
    """Return what waiting for others cost each rank in each traced step.

    Columns: rank, step, dur_ns, wait_ns (see exposed_waits), exposed_ns (all exposed communication), last (to how
    many of the step's matched collectives it came last), matched (how many there were).
    """
    of_step = (
        matched.assign(waited_ns=exposed_waits)
        .groupby(["rank", "step"])
        .agg(wait_ns=("waited_ns", "sum"), last=("last", "sum"), matched=("last", "size"))
    )
    steps = window_steps.join(of_step, on=["rank", "step"]).join(_of_steps(exposed), on=["rank", "step"])
    counted = ["wait_ns", "exposed_ns", "last", "matched"]
    return (
        steps[["rank", "step", "dur_ns", *counted]]
        .fillna(dict.fromkeys(counted, 0))
        .astype(dict.fromkeys(counted, np.int64))
    )
