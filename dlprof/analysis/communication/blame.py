"""Blame: each rank's waiting, attributed to the culprit and to the cause of its delay.

Two ranks leave one collective at the same time and enter the next at different times. The late rank is the culprit. The
cause is the time that it spent beyond the waiting rank in between, by category: a wait for data, longer computation, a
checkpoint. The comparison starts at the last collective that both left at the same place of the program, not at the
arrival of the waiting rank: a rank that was delayed before its forward pass still runs the pass while the others wait.
If the culprit itself had waited, in a collective of another group, the blame goes to that culprit, and so on to the
start of the chain.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import intervals as iv
from dlprof.analysis.communication.collectives import (
    SENT,
    SYNCHRONOUS,
    Nanoseconds,
    collectives,
    culprits,
    exposed_waits,
    matched,
    places,
)
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, across_ranks, maybe, needs, per_rank
from dlprof.analysis.step.breakdown import breakdown
from dlprof.analysis.step.partition import partition
from dlprof.analysis.step.savings import own_time
from dlprof.analysis.timeline.stalls import KINDS, stall_means, stalled_steps
from dlprof.errors import NotMeasured
from dlprof.result import CATEGORIES

# What the trace does not show: delays that are older than it, and time that lies in no category.
UNKNOWN = "other"

# A chain is followed over so many ranks, and from a culprit to so many of its last waits. The rest is attributed as
# communication to the last rank of the chain.
MOST_LINKS = 32
MOST_WAITS = 256

# If one rank computed longer than another during a collective, by more than this share of its length, they leave it at
# different places of the program.
_SAME_PLACE = 0.1

# The most reasons of a rank in the result. The rest of its waiting is one more.
MOST_REASONS = 16

_UNKNOWN, _COMMUNICATION, _COMPUTATION = map(CATEGORIES.index, (UNKNOWN, "communication", "computation"))

_TRANSFERS = np.eye(len(CATEGORIES))[[_COMMUNICATION]]

Rows = NDArray[np.int64]
Shares = NDArray[np.float64]


@per_rank
def accounts(
    collectives: Frame = needs(collectives), partition: dict[str, iv.Intervals] = needs(partition)
) -> pd.DataFrame:
    """Return the rank's time in each category up to the start and the end of each of its `collectives`, a row each.

    In ns of the steady traced steps so far, two columns a category ("copy_start", "copy_end"); a category that the rank
    lacks has no columns. begin_ns is the start of the first of these steps.
    """
    parts = {c: p for c, p in partition.items() if len(p)}
    begin = np.full(len(collectives), min((int(p[0, 0]) for p in parts.values()), default=0))
    columns = {"begin_ns": begin}
    for category, part in parts.items():
        for side in ("start", "end"):
            columns[f"{category}_{side}"] = iv.within(part, begin, collectives[f"{side}_ns"].to_numpy())
    return pd.DataFrame(columns)


@across_ranks
def attributed_waits(
    matched: Frame = needs(matched),
    accounts: Maybe[Frame] = maybe(accounts),
    exposed_waits: Nanoseconds = needs(exposed_waits),
) -> pd.DataFrame:
    """Attribute each rank's waiting in the traced steps: rank, culprit (the chain's start), category, ns (the sum).

    A rank's rows add up to its waiting in `waits`. Raises NotMeasured as `matched` does.
    """
    if accounts.lacking:
        first, why = next(iter(accounts.lacking.items()))
        raise NotMeasured(f"what rank {first} did meanwhile is not known: {why}")
    row = matched["row"].to_numpy()
    # These are the largest tables with many ranks (categories × collectives), so few are held at once.
    did, ended = (_columns(accounts.get(), side)[row] for side in ("start", "end"))
    before = _last_meeting(matched, ended[:, _COMPUTATION] - did[:, _COMPUTATION])
    met = before >= 0
    did[met] -= ended[before[met]]
    del ended
    # If the ranks have not met before in the trace, one may have started its trace late.
    begin = accounts.get()["begin_ns"].to_numpy()[row] - matched["offset_ns"].to_numpy()
    did[:, _UNKNOWN] += np.where(met, 0, begin - begin.min())
    links = _links(matched, before, exposed_waits)
    waited = np.bincount(links["row"], links["ns"], len(matched))
    did[:, _COMMUNICATION] = np.clip(did[:, _COMMUNICATION] - waited, 0.0, None)
    culprit = culprits(matched)
    more = did[culprit]
    more -= did
    del did
    np.clip(more, 0.0, None, out=more)
    passed_on = np.clip(waited[culprit] - waited, 0.0, None)
    more[more.sum(axis=1) + passed_on <= 0, _UNKNOWN] = 1.0
    total = more.sum(axis=1) + passed_on
    more /= total[:, None]
    rank = matched["rank"].to_numpy()
    return _followed(rank, culprit, exposed_waits, more, passed_on / total, links)


def _columns(accounts: pd.DataFrame, side: str) -> Shares:
    """Return the ranks' time until their collectives began ("start") or ended: a column a category, 0: none."""
    found = accounts.reindex(columns=[f"{c}_{side}" for c in CATEGORIES]).to_numpy(dtype=float)
    np.nan_to_num(found, copy=False)
    return found


def _links(pairs: pd.DataFrame, before: Rows, wait: Nanoseconds) -> pd.DataFrame:
    """Return a rank's waits from the last meeting of a row's ranks to that row: row, earlier (the wait's row), ns."""
    begin, done = pairs["begin_ns"].to_numpy(), pairs["done_ns"].to_numpy()
    since = np.where(before >= 0, done[before], np.iinfo(np.int64).min)
    rows, earlier = [], []
    for mine in places(pairs["rank"]).values():
        mine = mine[np.argsort(begin[mine], kind="stable")]  # with several streams they may be out of order
        waits = mine[wait[mine] > 0]
        beyond = np.searchsorted(begin[waits], begin[mine])
        first = np.maximum(np.searchsorted(begin[waits], since[mine]), beyond - MOST_WAITS)
        n = np.maximum(beyond - first, 0)
        rows.append(np.repeat(mine, n))
        earlier.append(waits[np.arange(n.sum()) + np.repeat(first - np.cumsum(n) + n, n)])
    row, link = np.concatenate(rows), np.concatenate(earlier)
    # A collective that was issued earlier and still runs delays no one.
    over = (begin + pairs["wait_ns"].to_numpy())[link] <= begin[row]
    return pd.DataFrame({"row": row[over], "earlier": link[over], "ns": wait[link[over]]})


def _followed(
    rank: Rows, culprit: Rows, wait: Nanoseconds, own: Shares, passed_on: Shares, links: pd.DataFrame
) -> pd.DataFrame:
    """Follow each wait to where its chain begins: rank, culprit, category, ns.

    `own` is the share of each row's delay that its culprit caused itself, by category; `passed_on` is the share from
    the culprit's earlier waiting. A chain that leads back to the waiting rank ends before it.
    """
    links = links.assign(share=links["ns"] / links.groupby("row")["ns"].transform("sum")).drop(columns="ns")
    at = np.flatnonzero(wait)
    waits = pd.DataFrame({"row": at, "rank": rank[at], "ns": wait[at].astype(float)})
    found = []
    for _ in range(MOST_LINKS):
        row = waits["row"].to_numpy()
        found.append(_by_culprit(waits, rank[culprit[row]], own, row))
        passed = waits.assign(row=culprit[row], ns=waits["ns"] * passed_on[row])
        if not passed["ns"].any():
            break
        passed = passed.groupby(["row", "rank"], as_index=False)["ns"].sum().merge(links, on="row")
        passed = passed.assign(ns=passed["ns"] * passed["share"])
        back = rank[culprit[passed["earlier"]]] == passed["rank"]
        found.append(_by_culprit(passed[back], rank[passed[back]["row"]], _TRANSFERS))
        waits = passed[~back].groupby(["earlier", "rank"], as_index=False)["ns"].sum()
        waits = waits.rename(columns={"earlier": "row"})
    else:
        found.append(_by_culprit(waits, rank[culprit[waits["row"]]], _TRANSFERS))
    combined = pd.concat(found, ignore_index=True).groupby(["rank", "culprit"], as_index=False).sum()
    reasons: pd.DataFrame = combined.melt(["rank", "culprit"], var_name="category", value_name="ns").query("ns > 0")
    return reasons


def _by_culprit(waits: pd.DataFrame, culprit: Rows, shares: Shares, rows: Rows | None = None) -> pd.DataFrame:
    """Return the ns of each rank's waits for each culprit, a column for each of CATEGORIES.

    `shares` has a row for each wait, or for each place that `rows` names, by CATEGORIES.
    """
    ranks, most = waits["rank"].to_numpy(dtype=np.int64), int(culprit.max(initial=0)) + 1
    known, of = np.unique(ranks * most + culprit, return_inverse=True)
    ns = waits["ns"].to_numpy()
    # Column by column: a table of all waits by all categories would be the largest of the analysis.
    sums = {
        c: np.bincount(of, ns * (s if rows is None else s[rows]), len(known))
        for c, s in zip(CATEGORIES, shares.T, strict=True)
    }
    return pd.DataFrame({**sums, "rank": known // most, "culprit": known % most})


def _last_meeting(pairs: pd.DataFrame, computed: Shares) -> Rows:
    """Return for each matched row the same rank's row of the last collective that all members of this one had left.

    −1 where the trace holds none. Only collectives that end for all members at once count: of sends and receives, those
    that neither left before the other came. Where the members computed differently long during one (`computed`, ns of
    each row), as in the backward pass, they left it at different places: it counts if there is no other.
    """
    rows = pairs.assign(at=np.arange(len(pairs)), computed=computed)
    met = rows.groupby("instance").agg(
        members=("members", "first"),
        kind=("collective", "first"),
        begin=("begin_ns", "min"),
        come=("begin_ns", "max"),
        left=("done_ns", "min"),
        done=("done_ns", "max"),
        least=("computed", "min"),
        most=("computed", "max"),
    )
    both = (met["kind"] == SENT) & (met["left"] >= met["come"])
    combined = met[met["kind"].isin((*SYNCHRONOUS, "")) | both].sort_values("done")
    apart = (combined["most"] - combined["least"]) > _SAME_PLACE * (combined["done"] - combined["begin"])
    everybody = frozenset(str(r) for r in pairs["rank"].unique())
    sets = {m: frozenset(m.split(",")) if m else everybody for m in met["members"].unique()}
    held_by: dict[str, list[frozenset[str]]] = {}
    for of in set(sets.values()):
        for rank in of:
            held_by.setdefault(rank, []).append(of)
    # For each set of members: the rows of `combined` at which its ranks left a collective at one place.
    done, row, fine = combined["done"].to_numpy(), combined.index.to_numpy(), ~apart.to_numpy()
    with_set: dict[frozenset[str], list[Rows]] = {}
    for members, at in places(combined["members"]).items():
        with_set.setdefault(sets[members], []).append(at)
    found, begin = np.full(len(met), -1), met["begin"].to_numpy()
    for members, these in places(met["members"]).items():
        mine = sets[members]
        wider = [at for of in held_by[next(iter(mine))] if of >= mine for at in with_set.get(of, ())]
        at = np.sort(np.concatenate(wider)) if wider else np.empty(0, dtype=np.int64)
        for chosen in (at, at[fine[at]]):
            if len(chosen):
                place = np.searchsorted(done[chosen], begin[these], side="right") - 1
                found[these] = np.where(place >= 0, row[chosen][place], found[these])
    earlier = pd.Series(found, index=met.index)
    row_at = rows.set_index(["instance", "rank"])["at"]
    wanted = pd.MultiIndex.from_arrays([earlier[rows["instance"]].to_numpy(), rows["rank"].to_numpy()])
    return row_at.reindex(wanted).fillna(-1).to_numpy(dtype=np.int64)


@across_ranks
def blame(
    own_time: Frame = needs(own_time),
    attributed_waits: Frame = needs(attributed_waits),
    stalled_steps: Maybe[Frame] = maybe(stalled_steps),
    stall_means: Maybe[Frame] = maybe(stall_means),
    breakdown: Frame = needs(breakdown),
    job: Job = needs(JOB),
) -> pd.DataFrame:
    """Attribute each rank's waiting in the mean steady step: rank, culprit, category, ns; of each rank the most first.

    A rank's rows add up to its wait_ns in `own_time`. Waiting for stalls is taken from all steady steps where they were
    recorded, the rest from the traced steps. Reasons beyond MOST_REASONS are one: culprit −1, UNKNOWN. Raises
    NotMeasured as `matched` does.
    """
    own = own_time.set_index("rank")["wait_ns"]
    if stalled_steps and stall_means:
        stalls = _stalls(stalled_steps.get(), stall_means.get(), job)
        most = (own / stalls.groupby("rank")["ns"].sum()).clip(upper=1.0)
        stalls = stalls.assign(ns=stalls["ns"] * stalls["rank"].map(most))
        left = own - stalls.groupby("rank")["ns"].sum().reindex(own.index).fillna(0.0)
        others = _scaled(attributed_waits[~attributed_waits["category"].isin(KINDS)], left)
        unknown = left[~left.index.isin(others["rank"])].rename("ns").reset_index().assign(culprit=-1, category=UNKNOWN)
        frame = pd.concat([stalls, others, unknown[attributed_waits.columns]], ignore_index=True)
    else:
        frame = _scaled(attributed_waits, own)
    frame = _at_most_spent(breakdown, frame)
    frame = frame[frame["ns"] > 0].sort_values(["rank", "ns"], ascending=[True, False], kind="stable")
    main = frame.groupby("rank").cumcount() < MOST_REASONS
    rest = frame[~main].groupby("rank", as_index=False)["ns"].sum().assign(culprit=-1, category=UNKNOWN)
    combined: pd.DataFrame = pd.concat([frame[main], rest[frame.columns]], ignore_index=True)
    return combined.sort_values("rank", kind="stable", ignore_index=True)


def _at_most_spent(breakdown: pd.DataFrame, frame: pd.DataFrame) -> pd.DataFrame:
    """Cut each charge to what the culprit's mean steady step has of it: traced steps may have more by chance."""
    spent = breakdown.groupby(["rank", "category"])["ns"].sum()
    most = spent.reindex(pd.MultiIndex.from_frame(frame[["culprit", "category"]])).fillna(0.0).to_numpy()
    most = np.where(frame["category"] == UNKNOWN, np.inf, most)
    over = frame.assign(ns=(frame["ns"] - most).clip(lower=0.0), category=UNKNOWN)
    both = pd.concat([frame.assign(ns=frame["ns"].clip(upper=most)), over], ignore_index=True)
    return both.groupby(["rank", "culprit", "category"], as_index=False, sort=False)[["ns"]].sum()


def _scaled(frame: pd.DataFrame, wait: pd.Series[float]) -> pd.DataFrame:
    """Scale each rank's blame to how long it waits."""
    scale = wait / frame.groupby("rank")["ns"].sum()
    return frame.assign(ns=frame["ns"] * frame["rank"].map(scale).fillna(0.0))


def _stalls(stalled_steps: pd.DataFrame, stall_means: pd.DataFrame, job: Job) -> pd.DataFrame:
    """Attribute each step's waiting for stalls to the rank with the longest, as far as it exceeds one's own."""
    parts = []
    for kind, mine in stalled_steps.groupby("kind"):
        stalls = mine.pivot_table(index="step", columns="rank", values="ns", aggfunc="sum", observed=True)
        stalls = stalls.reindex(columns=list(job.ranks)).fillna(0.0)
        waits = (-stalls).add(stalls.max(axis=1), axis=0) / stall_means["steps"].mean()
        found = waits.groupby(stalls.idxmax(axis=1)).sum().rename_axis(index="culprit")
        parts.append(found.reset_index().melt("culprit", var_name="rank", value_name="ns").assign(category=kind))
    combined = pd.concat(parts, ignore_index=True).astype({"rank": np.int64, "culprit": np.int64})
    return combined[combined["ns"] > 0][["rank", "culprit", "category", "ns"]]
