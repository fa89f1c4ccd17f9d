"""Blame: a rank's waiting for another, charged to what made that other one late.

Two ranks that leave one collective together and come to the next one apart did something different in between. What
the late one spent its time on beyond what the waiting one did, category by category, made it late: its wait for data,
its longer computation, its checkpoint. That counts from the last collective that both left at the same place of the
program, and not from when the waiting one arrived: a rank that was held up before its forward pass still runs the pass
while the others wait. Beside an exchange that overlaps the backward pass, who waits computes ahead, so that they leave
it at different places.

Who was late because it had waited itself, in a collective of another group, hands the blame on to the rank that it had
waited for, and so on to the start of the chain.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import intervals as iv
from dlprof.analysis.communication.collectives import Nanoseconds
from dlprof.analysis.communication.matching import SENT, SYNCHRONOUS
from dlprof.analysis.communication.waits import culprits
from dlprof.analysis.engine import Job, Maybe, across_ranks, per_rank
from dlprof.analysis.step.stalls import KINDS
from dlprof.errors import NotMeasured
from dlprof.result import CATEGORIES

# What the trace does not tell: lateness that is older than it, and time that lies in no category.
UNKNOWN = "other"

# A chain is followed over so many ranks, and from a late rank to so many of its last waits; what is left stays with the
# rank that the trail ends at, as communication.
MOST_LINKS = 32
MOST_WAITS = 256

# Who computed longer than another beside a collective, by more than this share of it, leaves it at another place.
_SAME_PLACE = 0.1

# So many of a rank's reasons travel to the result; what is left of its waiting is then one more.
MOST_REASONS = 16

_UNKNOWN = CATEGORIES.index(UNKNOWN)
_COMMUNICATION = CATEGORIES.index("communication")


@per_rank
def accounts(collectives: pd.DataFrame, partition: dict[str, iv.Intervals]) -> pd.DataFrame:
    """Return what this rank had spent on each category when each of its `collectives` began and when it had ended.

    A row a collective, in their order; ns of the steady traced steps so far, in two columns a category ("copy_start",
    "copy_end"), none of a category that the rank has nothing of. begin_ns is the start of the first of these steps.
    """
    parts = {c: p for c, p in partition.items() if len(p)}
    begin = np.full(len(collectives), min((int(p[0, 0]) for p in parts.values()), default=0))
    columns = {"begin_ns": begin}
    for category, part in parts.items():
        for side in ("start", "end"):
            columns[f"{category}_{side}"] = iv.within(part, begin, collectives[f"{side}_ns"].to_numpy())
    return pd.DataFrame(columns)


@across_ranks
def charged(matched: pd.DataFrame, accounts: Maybe[pd.DataFrame], exposed_waits: Maybe[Nanoseconds]) -> pd.DataFrame:
    """Charge each rank's waiting in the traced steps: rank, culprit (where the chain begins), category, ns (together).

    Of each rank they add up to its waiting in `waits`. Raises NotMeasured as `matched` does.
    """
    lacking = accounts.lacking
    if lacking:
        first, why = next(iter(lacking.items()))
        raise NotMeasured(f"nobody knows what rank {first} did meanwhile: {why}")
    spent = accounts.get()
    row = matched["row"].to_numpy()
    before = _before(matched, _beside(spent)[row])
    met = before >= 0
    since = np.where(met[:, None], _spent(spent, "end")[row[np.maximum(before, 0)]], 0.0)
    did = _spent(spent, "start")[row] - since
    # Where the ranks have not met before in the trace, one may have come late into it.
    begin = spent["begin_ns"].to_numpy()[row] - matched["offset_ns"].to_numpy()
    did[:, _UNKNOWN] += np.where(met, 0, begin - begin.min())
    wait = exposed_waits.get()
    links = _links(matched, before, wait)
    waited = np.bincount(links["row"], links["ns"], len(matched))
    did[:, _COMMUNICATION] = np.clip(did[:, _COMMUNICATION] - waited, 0.0, None)
    culprit = culprits(matched)
    more = np.clip(did[culprit] - did, 0.0, None)
    handed = np.clip(waited[culprit] - waited, 0.0, None)
    more[more.sum(axis=1) + handed <= 0, _UNKNOWN] = 1.0
    total = more.sum(axis=1) + handed
    return _followed(matched["rank"].to_numpy(), culprit, wait, more / total[:, None], handed / total, links)


def _links(pairs: pd.DataFrame, before: NDArray[np.int64], wait: NDArray[np.int64]) -> pd.DataFrame:
    """Return the waits that a rank had behind it when a matched row of it began: row, earlier (that row), ns.

    Those since the last meeting of the row's ranks, the last MOST_WAITS of them.
    """
    rank = pairs["rank"].to_numpy()
    begin = (pairs["start_ns"] - pairs["offset_ns"]).to_numpy()
    end = (pairs["end_ns"] - pairs["offset_ns"]).to_numpy()
    until = begin + pairs["wait_ns"].to_numpy()
    since = np.where(before >= 0, end[np.maximum(before, 0)], np.iinfo(np.int64).min)
    rows, earlier = [], []
    for one in np.unique(rank):
        mine = np.flatnonzero(rank == one)
        waits = mine[wait[mine] > 0]
        first = np.searchsorted(begin[waits], since[mine])
        beyond = np.searchsorted(begin[waits], begin[mine])
        first = np.maximum(first, beyond - MOST_WAITS)
        n = np.maximum(beyond - first, 0)
        rows.append(np.repeat(mine, n))
        earlier.append(waits[np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n) + np.repeat(first, n)])
    frame = pd.DataFrame({"row": np.concatenate(rows), "earlier": np.concatenate(earlier)})
    # What was issued before and goes on beside holds nobody up.
    frame = frame[until[frame["earlier"]] <= begin[frame["row"]]]
    chosen: pd.DataFrame = frame.assign(ns=wait[frame["earlier"]])
    return chosen


def _followed(
    rank: NDArray[np.int64],
    culprit: NDArray[np.int64],
    wait: NDArray[np.int64],
    own: NDArray[np.float64],
    handed: NDArray[np.float64],
    links: pd.DataFrame,
) -> pd.DataFrame:
    """Follow each wait to where its chain begins: rank, culprit, category, ns.

    `own` is the share of each row's lateness that its culprit's own doing is, by category, and `handed` what its
    waiting before is. A chain that leads back to the one that waits ends before it.
    """
    to = links.assign(share=links["ns"] / links.groupby("row")["ns"].transform("sum"))[["row", "earlier", "share"]]
    at = np.flatnonzero(wait)
    waits = pd.DataFrame({"row": at, "rank": rank[at], "ns": wait[at].astype(float)})
    found = []
    for _ in range(MOST_LINKS):
        row = waits["row"].to_numpy()
        spread = pd.DataFrame(own[row] * waits["ns"].to_numpy()[:, None], columns=list(CATEGORIES))
        found.append(spread.assign(rank=waits["rank"].to_numpy(), culprit=rank[culprit[row]]))
        passed = pd.DataFrame({"row": culprit[row], "rank": waits["rank"], "ns": waits["ns"] * handed[row]})
        if not passed["ns"].any():
            break
        passed = passed.groupby(["row", "rank"], as_index=False).agg({"ns": "sum"}).merge(to, on="row")
        passed = passed.assign(ns=passed["ns"] * passed["share"])
        back = rank[culprit[passed["earlier"]]] == passed["rank"].to_numpy()
        found.append(_ended(passed[back], rank))
        waits = passed[~back].groupby(["earlier", "rank"], as_index=False).agg({"ns": "sum"})
        waits = waits.rename(columns={"earlier": "row"})
    else:
        found.append(_ended(waits, rank[culprit]))
    together = pd.concat(found, ignore_index=True).groupby(["rank", "culprit"], as_index=False).sum()
    reasons: pd.DataFrame = together.melt(["rank", "culprit"], var_name="category", value_name="ns").query("ns > 0")
    return reasons


def _ended(waits: pd.DataFrame, culprit: NDArray[np.int64]) -> pd.DataFrame:
    """Charge what is followed no further to a rank for each row, as its communication."""
    cells = np.zeros((len(waits), len(CATEGORIES)))
    cells[:, _COMMUNICATION] = waits["ns"]
    ranks = {"rank": waits["rank"].to_numpy(), "culprit": culprit[waits["row"]]}
    return pd.DataFrame(cells, columns=list(CATEGORIES)).assign(**ranks)


def _spent(spent: pd.DataFrame, side: str) -> NDArray[np.float64]:
    """Return the accounts of all ranks as rows × CATEGORIES."""
    columns = [f"{c}_{side}" for c in CATEGORIES]
    return spent.reindex(columns=columns).fillna(0.0).to_numpy(dtype=float)


def _beside(spent: pd.DataFrame) -> NDArray[np.float64]:
    """Return for each row of `accounts` what its rank computed while it was in the collective, ns."""
    if "computation_end" not in spent:
        return np.zeros(len(spent))
    return (spent["computation_end"] - spent["computation_start"]).fillna(0.0).to_numpy(dtype=float)


def _before(pairs: pd.DataFrame, beside: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return for each matched row the same rank's row of the last collective that all members of this one had left.

    −1 where the trace holds none. Only what ends for all members at once counts: of sends and receives, those that
    neither had left before the other came. One beside which the members computed (`beside`, ns of each row) differently
    left them at different places of the program; it counts only where there is no other.
    """
    rows = pairs.assign(
        begin=pairs["start_ns"] - pairs["offset_ns"],
        done=pairs["end_ns"] - pairs["offset_ns"],
        at=np.arange(len(pairs)),
        beside=beside,
    )
    met = rows.groupby("instance").agg(
        members=("members", "first"),
        kind=("collective", "first"),
        begin=("begin", "min"),
        come=("begin", "max"),
        left=("done", "min"),
        done=("done", "max"),
        least_beside=("beside", "min"),
        most_beside=("beside", "max"),
    )
    everybody = frozenset(str(r) for r in pairs["rank"].unique())
    sets = {m: frozenset(m.split(",")) if m else everybody for m in met["members"].unique()}
    both = (met["kind"] == SENT) & (met["left"] >= met["come"])
    together = met[met["kind"].isin((*SYNCHRONOUS, "")) | both].sort_values("done")
    apart = (together["most_beside"] - together["least_beside"]) > _SAME_PLACE * (together["done"] - together["begin"])
    earlier = pd.Series(-1, index=met.index)
    for members, mine in sets.items():
        wider = together["members"].isin([m for m, s in sets.items() if s >= mine])
        these = met.index[met["members"] == members]
        for chosen in (together[wider], together[wider & ~apart]):
            if len(chosen):
                place = np.searchsorted(chosen["done"].to_numpy(), met.loc[these, "begin"].to_numpy(), side="right") - 1
                found = chosen.index.to_numpy()[np.maximum(place, 0)]
                earlier[these] = np.where(place >= 0, found, earlier[these].to_numpy())
    row_at = rows.set_index(["instance", "rank"])["at"]
    wanted = pd.MultiIndex.from_arrays([earlier[rows["instance"]].to_numpy(), rows["rank"].to_numpy()])
    return row_at.reindex(wanted).fillna(-1).to_numpy(dtype=np.int64)


@across_ranks
def blame(
    own_time: pd.DataFrame,
    charged: pd.DataFrame,
    stalled_steps: Maybe[pd.DataFrame],
    stall_means: Maybe[pd.DataFrame],
    breakdown: pd.DataFrame,
    job: Job,
) -> pd.DataFrame:
    """Charge each rank's waiting in the mean steady step: rank, culprit, category, ns; of each rank the most first.

    Of each rank they add up to wait_ns in `own_time`. Waiting for stalls is taken from every steady step, where they
    were recorded, and the traced steps tell the rest. Reasons too many are one: culprit −1, UNKNOWN. Raises NotMeasured
    as `matched` does.
    """
    own = own_time.set_index("rank")["wait_ns"]
    frame = charged
    stalls = _stalls(stalled_steps, stall_means, job)
    if stalls is None:
        frame = _to(frame, own)
    else:
        room = (own / stalls.groupby("rank")["ns"].sum()).clip(upper=1.0)
        stalls = stalls.assign(ns=stalls["ns"] * stalls["rank"].map(room))
        left = own - stalls.groupby("rank")["ns"].sum().reindex(own.index).fillna(0.0)
        others = _to(frame[~frame["category"].isin(KINDS)], left)
        unknown = left[~left.index.isin(others["rank"])].rename("ns").reset_index().assign(culprit=-1, category=UNKNOWN)
        frame = pd.concat([stalls, others, unknown[frame.columns]], ignore_index=True)
    frame = _at_most_spent(breakdown, frame)
    frame = frame[frame["ns"] > 0].sort_values(["rank", "ns"], ascending=[True, False], kind="stable")
    few = frame.groupby("rank").cumcount() < MOST_REASONS
    left = frame[~few].groupby("rank", as_index=False)["ns"].sum().assign(culprit=-1, category=UNKNOWN)
    together: pd.DataFrame = pd.concat([frame[few], left[frame.columns]], ignore_index=True)
    return together.sort_values("rank", kind="stable", ignore_index=True)


def _at_most_spent(breakdown: pd.DataFrame, frame: pd.DataFrame) -> pd.DataFrame:
    """Cut what is charged to a category to what the culprit's mean steady step has of it; the rest is UNKNOWN.

    The traced steps may hold more of it than the others by chance.
    """
    spent = breakdown.groupby(["rank", "category"])["ns"].sum()
    most = spent.reindex(pd.MultiIndex.from_frame(frame[["culprit", "category"]])).fillna(0.0).to_numpy()
    most = np.where(frame["category"] == UNKNOWN, np.inf, most)
    over = frame.assign(ns=(frame["ns"] - most).clip(lower=0.0), category=UNKNOWN)
    both = pd.concat([frame.assign(ns=frame["ns"].clip(upper=most)), over], ignore_index=True)
    together: pd.DataFrame = both.groupby(["rank", "culprit", "category"], as_index=False, sort=False).agg(
        {"ns": "sum"}
    )
    return together


def _to(frame: pd.DataFrame, wait: pd.Series[float]) -> pd.DataFrame:
    """Scale each rank's blame to how long it waits."""
    scale = wait / frame.groupby("rank")["ns"].sum()
    return frame.assign(ns=frame["ns"] * frame["rank"].map(scale).fillna(0.0))


def _stalls(stalled_steps: Maybe[pd.DataFrame], stall_means: Maybe[pd.DataFrame], job: Job) -> pd.DataFrame | None:
    """Charge each rank's waiting for the stalls of others, as all steady steps tell it; None where not recorded.

    In a step that stalls all wait until the longest stall is over: it is that rank's, as far as it exceeds their own.
    """
    try:
        steps, means = stalled_steps.get(), stall_means.get()
    except NotMeasured:
        return None
    parts = []
    for kind, mine in steps.groupby("kind"):
        table = mine.pivot_table(index="step", columns="rank", values="ns", aggfunc="sum", observed=True)
        table = table.reindex(columns=list(job.ranks)).fillna(0.0)
        waits = (-table).add(table.max(axis=1), axis=0) / means["steps"].mean()
        found = waits.groupby(table.idxmax(axis=1)).sum().rename_axis(index="culprit")
        parts.append(found.reset_index().melt("culprit", var_name="rank", value_name="ns").assign(category=kind))
    if not parts:
        return None
    together = pd.concat(parts, ignore_index=True)
    together = together.astype({"rank": np.int64, "culprit": np.int64})
    return together[together["ns"] > 0][["rank", "culprit", "category", "ns"]]
