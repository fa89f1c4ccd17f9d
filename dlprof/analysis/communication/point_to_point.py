"""Sends and receives: what a rank exchanges with one other, and with which.

NCCL's kernels tell the other rank where torch wrote it there. Where they do not, as those that carry several sends and
receives at once, the calls tell that came before the launch. gloo's ranges never tell: torch's calls around them do
where the trace holds inputs, and in a job of two ranks there is only one other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis.engine import RankFacts, within_rank
from dlprof.analysis.timeline import host

POINT_TO_POINT = ("send", "recv")

# A kernel of NCCL's that may be either, both, several of them, or a collective that is made of them.
_EITHER = "send_recv"

# Who writes of a call whom it sends to, the most telling first; each call of the script's shows once in each.
_CALLS = ("record_param_comms", "c10d::", "nccl:")

_COLUMNS = ("collective", "group", "peer", "bytes", "dtype", "start_ns", "dur_ns")


@within_rank
def point_to_point(
    spans: pd.DataFrame, is_on_device: NDArray[np.bool_], has_device: bool, rank: RankFacts
) -> pd.DataFrame:
    """Return the sends and receives in order: row (of spans), collective, group, peer, bytes, dtype, start_ns, dur_ns.

    What carries several at once has a row for each. peer: the other rank, −1: not told.
    """
    named = host.is_kind(spans, "communication") & host.is_one_of(spans["collective"], *POINT_TO_POINT, _EITHER)
    if not named.any():
        return pd.DataFrame({name: spans[name].iloc[:0] for name in _COLUMNS}).assign(row=0)[["row", *_COLUMNS]]
    calls = _told(spans[named & ~is_on_device & (spans["peer"].to_numpy() >= 0)])
    if has_device:
        found = _of_kernels(spans, _told(spans[named & is_on_device]), calls)
    else:
        done = _told(spans[named & ~is_on_device & ~host.is_named(spans, *_CALLS, "_c10d")])
        found = _of_ranges(done[done["collective"] != _EITHER], calls)
    found = found.assign(peer=np.where(found["peer"] < 0, _only_other(rank, found["group"]), found["peer"]))
    return found.sort_values(["start_ns", "order"], kind="stable", ignore_index=True)[["row", *_COLUMNS]]


def _told(spans: pd.DataFrame) -> pd.DataFrame:
    chosen = spans[[*_COLUMNS, "lane", "name", "launch"]]
    text = {name: chosen[name].astype("str") for name in ("collective", "group", "dtype", "lane", "name")}
    return chosen.assign(row=chosen.index, order=0, **text)


def _of_kernels(spans: pd.DataFrame, kernels: pd.DataFrame, calls: pd.DataFrame) -> pd.DataFrame:
    """Return what kernels carry: what they tell themselves, else the calls between the launch before and their own."""
    runtime = np.flatnonzero(host.is_kind(spans, "runtime") & np.isin(spans["launch"].to_numpy(), kernels["launch"]))
    launches = spans.iloc[runtime][["launch", "lane", "start_ns"]].drop_duplicates("launch")
    launches = launches.rename(columns={"start_ns": "launched_ns"}).assign(lane=launches["lane"].astype("str"))
    kernels = kernels.drop(columns="lane").merge(launches, on="launch", how="left")
    silent = (kernels["peer"] < 0) & kernels["launched_ns"].notna()
    source = next((s for s in _CALLS if calls["name"].str.startswith(s).any()), None)
    if source is None or not silent.any():
        return kernels[kernels["collective"] != _EITHER]
    calls = calls[calls["name"].str.startswith(source)].sort_values("start_ns", kind="stable")
    of = np.full(len(calls), -1)
    for lane, mine in kernels[kernels["launched_ns"].notna()].sort_values("launched_ns").groupby("lane"):
        here = np.flatnonzero(calls["lane"] == lane)
        place = np.searchsorted(mine["launched_ns"].to_numpy(), calls["start_ns"].to_numpy()[here])
        of[here] = np.append(mine.index, -1)[place]
    carried = calls.assign(kernel=of, order=np.arange(len(calls)))[np.isin(of, kernels.index[silent])]
    several = carried[["kernel", "collective", "group", "peer", "bytes", "dtype", "order"]].merge(
        kernels[["row", "start_ns", "dur_ns"]], left_on="kernel", right_index=True
    )
    alone = kernels[~kernels.index.isin(carried["kernel"]) & (kernels["collective"] != _EITHER)]
    return pd.concat([alone, several], ignore_index=True)


def _of_ranges(ranges: pd.DataFrame, calls: pd.DataFrame) -> pd.DataFrame:
    """Return ranges the other rank of the call that each began in: the last of its kind on its thread."""
    calls = calls[calls["name"].str.startswith("c10d::")]
    if not len(calls) or not len(ranges):
        return ranges
    by = ["lane", "collective"]
    peers = calls[["start_ns", "peer", *by]].sort_values("start_ns")
    found = pd.merge_asof(ranges.drop(columns="peer").sort_values("start_ns"), peers, on="start_ns", by=by)
    return found.assign(peer=found["peer"].fillna(-1).astype(np.int64))


def _only_other(rank: RankFacts, groups: pd.Series[str]) -> pd.Series[int]:
    """Return the other member of groups of two, −1 of any other; who does not say a group has the job's only one."""
    known: Mapping[str, Any] = rank.trace_facts.get("groups") or {}
    world = rank.trace_facts.get("world_size") or rank.facts.get("world_size")

    def other(group: str) -> int:
        told = known.get(group) or (next(iter(known.values())) if len(known) == 1 and not group else {})
        members = told.get("ranks") or (range(2) if world == 2 else ())
        return sum(members) - rank.index if len(members) == 2 and rank.index in members else -1

    return groups.map({g: other(g) for g in groups.unique()}).astype(np.int64)
