"""The collectives, sends and receives of each rank, its exposed communication, and its traced steps.

The other rank of a send or receive is in NCCL's kernels if torch wrote it there. Kernels that carry several sends and
receives lack it; it is then in the calls before the launch. gloo's ranges never name it: torch's calls around them do
if the trace holds inputs, and a job of two ranks has only one other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import RANK, Frame, Maybe, RankFacts, maybe, needs, per_rank, within_rank
from dlprof.analysis.step.partition import exposed_communication
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import device_work, exchanges_on_host
from dlprof.analysis.timeline.host import is_on_device
from dlprof.analysis.timeline.launches import UNKNOWN, Launches, launches
from dlprof.analysis.timeline.steps import Timing, launched_within, timing
from dlprof.read.kineto.patterns import EXPERT_KERNEL

Nanoseconds = NDArray[np.int64]

# The members of a group that is not known.
NOBODY = "?"
NO_GROUP = (
    "expert-parallel kernels whose group the trace does not record, or that do not wait for the others (low latency)"
)

# Expert-parallel kernels name no group. Megatron-LM and DeviceMesh name theirs (EXPERT_MODEL_PARALLEL_GROUP, mesh_ep);
# a group that spans their replicas or other stages is a wider one. Low-latency kernels send in one and receive in
# another.
_EXPERTS = re.compile(EXPERT_KERNEL)
_OF_EXPERTS = re.compile(r"(?i)(?:^|[\W_])(?:ep|expert)(?:$|[\W_])")
_WIDER = re.compile(r"(?i)data|pipeline|(?:^|[\W_])e?[dp]p(?:$|[\W_])")
_LOW_LATENCY = re.compile(r"internode_ll::|::(?:dispatch|combine)_ll\b")

POINT_TO_POINT = ("send", "recv")

# Reasons why a rank's collectives are not known.
ONE_RANK = "one rank: there is no other to exchange with or to wait for"
NO_COLLECTIVES = "the traced steps hold no collectives; a longer trace window (`--window`) may hold some"
NO_SIZES = "the trace does not record how large its collectives are (`--shapes`, or record_shapes=True, does)"

# An NCCL kernel that may be a send, a receive, several of them, or a collective made of them.
_EITHER = "send_recv"

# Ranges that name the other rank of a call, the most detailed first; each of the script's calls is once in each.
_CALLS = ("record_param_comms", "c10d::", "nccl:")

# dlprof's own range around an all-to-all, with the sizes sent and received: "dlprof::all_to_all 3,5>4,1".
RANGE = "dlprof::all_to_all "

_COLUMNS = ["collective", "group", "peer", "bytes", "dtype", "start_ns", "dur_ns"]


@within_rank
def point_to_point(
    spans: Frame = needs(schema.SPANS),
    is_on_device: NDArray[np.bool_] = needs(is_on_device),
    exchanges_on_host: bool = needs(exchanges_on_host),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return the sends and receives in order: row (of spans), collective, group, peer, bytes, dtype, start_ns, dur_ns.

    A kernel that carries several has a row for each. peer: the other rank, −1: unknown.
    """
    named = host.is_kind(spans, "communication") & host.is_one_of(spans["collective"], *POINT_TO_POINT, _EITHER)
    if not named.any():
        return spans[_COLUMNS].iloc[:0].assign(row=0)
    calls = _texts(spans, named & ~is_on_device & (spans["peer"].to_numpy() >= 0))
    if exchanges_on_host:
        done = _texts(spans, named & ~is_on_device & ~host.is_named(spans, *_CALLS, "_c10d"))
        found = _of_ranges(done[done["collective"] != _EITHER], calls)
    else:
        found = _of_kernels(spans, _texts(spans, named & is_on_device), calls)
    found = found.assign(peer=found["peer"].where(found["peer"] >= 0, _only_other(rank, found["group"])))
    return found.sort_values(["start_ns", "order"], kind="stable", ignore_index=True)[["row", *_COLUMNS]]


@per_rank
def collectives(
    spans: Frame = needs(schema.SPANS),
    timing: Timing = needs(timing),
    point_to_point: Frame = needs(point_to_point),
    exchanges_on_host: bool = needs(exchanges_on_host),
    is_on_device: NDArray[np.bool_] = needs(is_on_device),
    device_work: Frame = needs(device_work),
    launches: Maybe[Launches] = maybe(launches),
    launched_within: Maybe[NDArray[np.int64]] = maybe(launched_within),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return the collectives, sends and receives of the steady traced steps, in the order in which they were issued.

    Columns: step, group, members (the ranks of the process group as text, "" where it is all ranks, NOBODY where it is
    not known), collective, peer (the other rank of a send or receive, else −1), bytes, dtype, sequence (−1: unknown),
    communicator ("": unknown), pieces (of an all-to-all, as in the shape of schema.SPANS; "": unknown), stream (the
    rank's communicating streams, numbered in order of first use; 0 on the host, where any thread of a pool may send),
    made_ns (the launch, else the start), start_ns, end_ns. On a device these are its kernels, each with the step that
    launched it; on the host its spans (gloo: from issue to completion). Empty where the rank has none.
    """
    of = host.is_kind(spans, "communication") & ~host.is_one_of(spans["collective"], *POINT_TO_POINT)
    of[point_to_point["row"].to_numpy(dtype=np.int64)] = False
    if exchanges_on_host:
        of &= ~is_on_device & ~host.is_named(spans, "c10d", "_c10d") & ~host.is_one_of(spans["collective"], "")
    else:
        of &= is_on_device
    rows = np.concatenate((np.flatnonzero(of), point_to_point["row"].to_numpy(dtype=np.int64)))
    chosen = spans[[*_COLUMNS, "name"]][of].astype({"group": "str", "collective": "str", "dtype": "str"})
    if len(point_to_point):
        chosen = pd.concat([chosen, point_to_point[_COLUMNS]])
    made = chosen["start_ns"].to_numpy()
    if exchanges_on_host:
        window = np.searchsorted(timing.host_windows[:, 0], made, side="right") - 1
        window = np.where(iv.holds(timing.host_windows, made), window, -1)
    else:
        at = np.searchsorted(device_work.index.to_numpy(), rows)
        called, window = launches.get().called[at], launched_within.get()[at]
        made = np.where(called < UNKNOWN, called, made)
    keep = np.flatnonzero(window >= 0)
    keep = keep[np.argsort(made[keep], kind="stable")]
    pieces = _pieces_of_calls(spans, rows) if exchanges_on_host else host.written(spans["shape"].iloc[rows])
    rows, pieces, chosen = rows[keep], pieces[keep], chosen.iloc[keep].reset_index(drop=True)
    lane = spans["lane"].array.codes[rows]
    return pd.DataFrame(
        {
            "step": _step_numbers(timing)[window[keep]],
            "group": chosen["group"],
            "members": _members_of(rank, chosen),
            **{name: chosen[name] for name in ("collective", "peer", "bytes", "dtype")},
            "sequence": spans["sequence"].to_numpy()[rows],
            "communicator": spans["communicator"].iloc[rows].astype("str").to_numpy(),
            "pieces": pieces,
            "stream": 0 if exchanges_on_host else pd.factorize(lane)[0].astype(np.int64),
            "made_ns": made[keep],
            "start_ns": chosen["start_ns"],
            "end_ns": chosen["start_ns"] + chosen["dur_ns"],
        }
    )


def _pieces_of_calls(spans: pd.DataFrame, rows: Nanoseconds) -> NDArray[Any]:
    """Return the sizes sent to and received from each rank in the all-to-alls among gloo's spans `rows`; "" elsewhere.

    gloo's own ranges lack the sizes. torch's calls have them if the trace holds inputs, and so do dlprof's ranges
    around them. Calls and ranges are paired in order, if there are as many.
    """
    found = np.full(len(rows), "", dtype=object)
    ours = spans["collective"].array[rows] == "all_to_all"
    called = host.is_named(spans, "c10d::alltoall")
    if not ours.any() or called.sum() != ours.sum():
        return found
    calls = spans[["lane", "start_ns", "dur_ns", "shape"]][called].astype({"lane": "str", "shape": "str"})
    ranges = spans[["lane", "name", "start_ns", "dur_ns"]][host.is_named(spans, RANGE)].astype(
        {"lane": "str", "name": "str"}
    )
    ranges = ranges.assign(until=ranges["start_ns"] + ranges["dur_ns"]).drop(columns="dur_ns")
    around = pd.merge_asof(calls, ranges, on="start_ns", by="lane")
    inside = around["until"] >= around["start_ns"]
    around_pieces = around["shape"].where(
        around["shape"] != "", around["name"].str.removeprefix(RANGE).where(inside, "")
    )
    around_pieces = around_pieces.where(around_pieces.map(_is_pieces), "")
    found[np.flatnonzero(ours)[np.argsort(spans["start_ns"].to_numpy()[rows[ours]], kind="stable")]] = around_pieces
    return found


def _is_pieces(text: str) -> bool:
    """Return whether a range's name says how many rows go where, or that all pieces are alike (">")."""
    sides = [side.split(",") for side in text.split(">")]
    numbers = [n.isdecimal() and len(n) < 16 for side in sides for n in side]
    return text == ">" or (len(sides) == 2 and len(sides[0]) == len(sides[1]) and all(numbers))


def _step_numbers(timing: Timing) -> Nanoseconds:
    """Return the number of each steady traced step; 0 where the whole trace stands for one."""
    return timing.numbers if len(timing.numbers) else np.zeros(len(timing.windows), dtype=np.int64)


def _members_of(rank: RankFacts, rows: pd.DataFrame) -> NDArray[Any]:
    """Return the ranks of each row's group, as text."""
    groups = rank.trace_facts.get("groups") or {}
    world = int(rank.trace_facts.get("world_size") or rank.facts.get("world_size") or 0)
    texts = {g: ",".join(map(str, (groups.get(g) or {}).get("ranks") or ())) for g in rows["group"].unique()}
    members = rows["group"].map(texts).to_numpy(dtype=object)
    experts = [n for n in rows["name"].unique() if _EXPERTS.search(str(n))]
    if experts:
        several = any(1 < int(g.get("size") or 0) < world for g in groups.values())
        theirs = (rows["group"] == "") & rows["name"].isin(experts)
        members[theirs.to_numpy()] = _experts(rank, groups) if several else ""
        members[rows["name"].isin([n for n in experts if _LOW_LATENCY.search(str(n))]).to_numpy()] = NOBODY
    return members


def _experts(rank: RankFacts, groups: Mapping[str, Any]) -> str:
    """Return the ranks that share this one's experts, as text: the largest group that is named for them."""
    known = [
        g.get("ranks") or []
        for g in groups.values()
        if _OF_EXPERTS.search(str(g.get("desc") or "")) and not _WIDER.search(str(g.get("desc")))
    ]
    mine = [ranks for ranks in known if rank.index in ranks]
    return ",".join(map(str, max(mine, key=len))) if mine else NOBODY


@per_rank
def exposed(
    timing: Timing = needs(timing), exposed_communication: iv.Intervals = needs(exposed_communication)
) -> pd.DataFrame:
    """Return the exposed communication of the steady traced steps: step, start_ns, end_ns."""
    found = iv.intersect(exposed_communication, timing.windows)
    found = found[found[:, 1] > found[:, 0]]
    step = _step_numbers(timing)[np.searchsorted(timing.windows[:, 0], found[:, 0], side="right") - 1]
    return pd.DataFrame({"step": step, "start_ns": found[:, 0], "end_ns": found[:, 1]})


@per_rank
def window_steps(timing: Timing = needs(timing)) -> pd.DataFrame:
    """Return the steady traced steps: step, dur_ns."""
    lengths = timing.windows[:, 1] - timing.windows[:, 0]
    return pd.DataFrame({"step": _step_numbers(timing), "dur_ns": lengths})


def _texts(spans: pd.DataFrame, chosen: NDArray[np.bool_]) -> pd.DataFrame:
    """Return some spans with their places as `row`, and texts in place of categories."""
    texts = dict.fromkeys(("collective", "group", "dtype", "lane", "name"), "str")
    found = spans[[*_COLUMNS, "lane", "name", "launch"]][chosen]  # columns first: choosing rows of all takes longer
    return found.astype(texts).assign(row=found.index, order=0)


def _of_kernels(spans: pd.DataFrame, kernels: pd.DataFrame, calls: pd.DataFrame) -> pd.DataFrame:
    """Return what kernels carry: what they name themselves, else the calls between the launch before and their own."""
    calls_of = np.flatnonzero(host.is_kind(spans, "runtime"))
    runtime = calls_of[host.is_among(spans["launch"].to_numpy()[calls_of], kernels["launch"].to_numpy())]
    launches = spans[["launch", "lane", "start_ns"]].iloc[runtime].drop_duplicates("launch")
    launches = launches.rename(columns={"start_ns": "launched_ns"}).astype({"lane": "str"})
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
    several = carried.drop(columns=["row", "start_ns", "dur_ns"]).merge(
        kernels[["row", "start_ns", "dur_ns"]], left_on="kernel", right_index=True
    )
    alone = kernels[~kernels.index.isin(carried["kernel"]) & (kernels["collective"] != _EITHER)]
    return pd.concat([alone, several], ignore_index=True)


def _of_ranges(ranges: pd.DataFrame, calls: pd.DataFrame) -> pd.DataFrame:
    """Return ranges with the other rank of the call in which each began: the last of its kind on its thread."""
    calls = calls[calls["name"].str.startswith("c10d::")]
    if not len(calls) or not len(ranges):
        return ranges
    by = ["lane", "collective"]
    peers = calls[["start_ns", "peer", *by]].sort_values("start_ns")
    found = pd.merge_asof(ranges.drop(columns="peer").sort_values("start_ns"), peers, on="start_ns", by=by)
    return found.assign(peer=found["peer"].fillna(-1).astype(np.int64))


def _only_other(rank: RankFacts, groups: pd.Series[str]) -> pd.Series[int]:
    """Return the other member of groups of two, −1 of any other; an unnamed group is the job's only one."""
    known: Mapping[str, Any] = rank.trace_facts.get("groups") or {}
    world = rank.trace_facts.get("world_size") or rank.facts.get("world_size")

    def other(group: str) -> int:
        of = known.get(group) or (next(iter(known.values())) if len(known) == 1 and not group else {})
        members = of.get("ranks") or (range(2) if world == 2 else ())
        return sum(members) - rank.index if len(members) == 2 and rank.index in members else -1

    return groups.map({g: other(g) for g in groups.unique()}).astype(np.int64)
