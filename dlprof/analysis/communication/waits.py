"""What waiting for other ranks in collectives costs a rank: computing nothing meanwhile, and what that lays open."""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof.analysis import intervals as iv
from dlprof.analysis.communication.collectives import Nanoseconds
from dlprof.analysis.engine import Job, across_ranks


@across_ranks
def bare_waits(matched: pd.DataFrame, exposed: pd.DataFrame, job: Job) -> pd.DataFrame:
    """Return the rows of `matched` with waited_ns, and by, the rank that came last to the same collective.

    waited_ns is what of wait_ns its rank had no computation beside; of waits that overlap the time is the earliest
    one's. Raises NotMeasured as `matched` does.
    """
    rank, begin = matched["rank"].to_numpy(), matched["start_ns"].to_numpy()
    bare = exposed_between(exposed, job, rank, begin, begin + matched["wait_ns"].to_numpy())
    return matched.assign(waited_ns=bare, by=rank[culprits(matched)])


@across_ranks
def waiting(matched: pd.DataFrame, exposed: pd.DataFrame, job: Job) -> dict[int, iv.Intervals]:
    """Return when, in the steady traced steps, each rank waited for another and computed nothing meanwhile.

    Raises NotMeasured as `matched` does.
    """
    until = matched.assign(until_ns=matched["start_ns"] + matched["wait_ns"])
    waited = {int(str(r)): _set(g, "until_ns") for r, g in until.groupby("rank")}
    return {r: iv.intersect(waited.get(r, iv.EMPTY), bare) for r, bare in _exposed_of(exposed, job).items()}


@across_ranks
def exposed_waits(bare_waits: pd.DataFrame, exposed: pd.DataFrame, job: Job) -> Nanoseconds:
    """Return for each row of `matched` what waiting in it cost its rank, ns: waiting, and what that laid open.

    Waiting counts where the rank computed nothing meanwhile; where it waits in several collectives at once, the time
    is the earliest one's, so that of each rank they add up. A transfer that nothing hides here, but that computation of
    the last to come hides there, is open only because this rank is ahead. Such transfers count as far as this rank had
    computed while it waited: without the waiting, that would have hidden them.
    """
    rank, begin, end = (bare_waits[name].to_numpy() for name in ("rank", "start_ns", "end_ns"))
    until, waited = begin + bare_waits["wait_ns"].to_numpy(), bare_waits["waited_ns"].to_numpy()
    bare = exposed_between(exposed, job, rank, until, end)
    rows = pd.DataFrame({"rank": rank, "step": bare_waits["step"].to_numpy()})
    rows = rows.assign(
        waited=waited,
        hidden=_apart(rank, begin, until) - waited,
        opened=np.maximum(bare - bare[culprits(bare_waits)], 0),
    )
    of_step = rows.groupby(["rank", "step"]).sum().join(_bare_of_steps(exposed), how="left")
    room = of_step["exposed_ns"] - of_step["waited"]
    most = of_step["hidden"].where(of_step["hidden"] < room, room).clip(lower=0)
    share = (most / of_step["opened"].replace(0, np.nan)).clip(upper=1.0).fillna(0.0)
    part = share.reindex(pd.MultiIndex.from_frame(rows[["rank", "step"]])).to_numpy()
    found: Nanoseconds = waited + np.rint(rows["opened"].to_numpy() * part).astype(np.int64)
    return found


def culprits(pairs: pd.DataFrame) -> Nanoseconds:
    """Return for each matched row the place of the row of the rank that came last to the same collective."""
    instance, last = pairs["instance"].to_numpy(), pairs["last"].to_numpy()
    row_of = np.zeros(instance.max() + 1, dtype=np.int64)
    at = np.flatnonzero(last)[::-1]  # of several, the first rank
    row_of[instance[at]] = at
    found: Nanoseconds = row_of[instance]
    return found


def exposed_between(
    exposed: pd.DataFrame, job: Job, ranks: Nanoseconds, begin: Nanoseconds, end: Nanoseconds
) -> Nanoseconds:
    """Return how much of some times of some ranks is exposed communication, ns; of times that overlap earliest's."""
    found = np.zeros(len(ranks), dtype=np.int64)
    for rank, intervals in _exposed_of(exposed, job).items():
        at, start, until = _one_after_the_other(ranks, rank, begin, end)
        found[at] = iv.within(intervals, start, until)
    return found


def _apart(ranks: Nanoseconds, begin: Nanoseconds, end: Nanoseconds) -> Nanoseconds:
    """Return how long some times of some ranks are, ns; of times that overlap the earliest's."""
    found = np.zeros(len(ranks), dtype=np.int64)
    for rank in np.unique(ranks):
        at, start, until = _one_after_the_other(ranks, int(rank), begin, end)
        found[at] = until - start
    return found


def _one_after_the_other(
    ranks: Nanoseconds, rank: int, begin: Nanoseconds, end: Nanoseconds
) -> tuple[Nanoseconds, Nanoseconds, Nanoseconds]:
    """Return the places, starts and ends of a rank's times, each beginning where all before it have ended."""
    at = np.flatnonzero(ranks == rank)
    at = at[np.argsort(begin[at], kind="stable")]
    start, until = begin[at], end[at]
    start = np.maximum(start, np.concatenate((start[:1], np.maximum.accumulate(until)[:-1])))
    return at, start, np.maximum(start, until)


def _bare_of_steps(exposed: pd.DataFrame) -> pd.Series[int]:
    return (
        exposed.assign(exposed_ns=exposed["end_ns"] - exposed["start_ns"]).groupby(["rank", "step"])["exposed_ns"].sum()
    )


def _exposed_of(exposed: pd.DataFrame, job: Job) -> dict[int, iv.Intervals]:
    of = {int(str(r)): _set(g, "end_ns") for r, g in exposed.groupby("rank")}
    return {r: of.get(r, iv.EMPTY) for r in job.ranks}


@across_ranks
def waits(
    matched: pd.DataFrame, exposed_waits: Nanoseconds, window_steps: pd.DataFrame, exposed: pd.DataFrame
) -> pd.DataFrame:
    """Return what waiting for others cost each rank in each traced step.

    Columns: rank, step, dur_ns, loose_ns (see traced_steps), wait_ns (see exposed_waits), exposed_ns (all exposed
    communication), last, matched (how many of the step's matched collectives it came to last, and how many there were).
    A wait belongs to the step in which it begins. Raises NotMeasured as `matched` does.
    """
    pairs = matched.assign(waited_ns=exposed_waits)
    of_step = pairs.groupby(["rank", "step"]).agg(
        wait_ns=("waited_ns", "sum"), last=("last", "sum"), matched=("last", "size")
    )
    steps = window_steps.join(of_step, on=["rank", "step"])
    steps = steps.join(_bare_of_steps(exposed), on=["rank", "step"])
    counted = ["wait_ns", "exposed_ns", "last", "matched"]
    steps[counted] = steps[counted].fillna(0).astype(np.int64)
    return steps[["rank", "step", "dur_ns", "loose_ns", *counted]]


def _set(frame: pd.DataFrame, end: str) -> iv.Intervals:
    return iv.union(frame["start_ns"].to_numpy(), frame[end].to_numpy())
