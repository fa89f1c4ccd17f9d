"""The collectives, sends and receives of each rank, matched over all ranks, and how long each rank waited in them.

The other rank of a send or receive is in NCCL's kernels if torch wrote it there. Kernels that carry several sends and
receives lack it; it is then in the calls before the launch. gloo's ranges never name it: torch's calls around them do
if the trace holds inputs, and a job of two ranks has only one other.

Collectives match by their number where the trace has it, else by process group and order; a send and its receive by
the two ranks and their order. On aligned clocks, the others waited for the last to arrive: wait = latest
start − own start. The rest of a rank's communication is transfer. Of a broadcast, the others wait for its source; in a
reduction to one rank, only that one waits. What waiting costs a rank: idle time, and the transfers that it exposes.
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
from dlprof.analysis import settings
from dlprof.analysis.engine import (
    JOB,
    RANK,
    Frame,
    Job,
    Maybe,
    RankFacts,
    across_ranks,
    maybe,
    needs,
    per_rank,
    within_rank,
)
from dlprof.analysis.step.partition import exposed_communication
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import UNKNOWN, Launches, device_work, exchanges_on_host, launches
from dlprof.analysis.timeline.host import is_on_device
from dlprof.analysis.timeline.steps import Timing, launched_within, timing
from dlprof.errors import DoesNotApply, NotMeasured
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
    launch, mine = spans["launch"].to_numpy(), kernels["launch"].to_numpy()
    calls_of = np.flatnonzero(host.is_kind(spans, "runtime"))
    runtime = calls_of[host.is_among(launch[calls_of], mine)]
    made, first = np.unique(launch[runtime], return_index=True)
    place = np.minimum(np.searchsorted(made, mine), max(len(made) - 1, 0))
    known = np.isin(mine, made)
    row = runtime[first[place]] if len(made) else np.zeros(len(mine), dtype=np.int64)
    launched, lane = spans["start_ns"].to_numpy()[row], host.written(spans["lane"].iloc[row])
    silent = (kernels["peer"].to_numpy() < 0) & known
    either: NDArray[np.bool_] = kernels["collective"].to_numpy() == _EITHER
    source = next((s for s in _CALLS if calls["name"].str.startswith(s).any()), None)
    if source is None or not silent.any():
        return kernels.loc[~either]
    calls = calls[calls["name"].str.startswith(source)].sort_values("start_ns", kind="stable")
    of = np.full(len(calls), -1)
    for thread in np.unique(lane[known].astype(str)).tolist():
        here, theirs = np.flatnonzero(calls["lane"] == thread), np.flatnonzero(known & (lane == thread))
        theirs = theirs[np.argsort(launched[theirs], kind="stable")]
        at = np.searchsorted(launched[theirs], calls["start_ns"].to_numpy()[here])
        of[here] = np.append(theirs, -1)[at]
    carries = (of >= 0) & silent[of]
    order, of = np.flatnonzero(carries), of[carries]
    carrier = {name: kernels[name].to_numpy()[of] for name in ("row", "start_ns", "dur_ns")}
    several = calls[carries].assign(order=order, **carrier)
    alone = kernels.loc[~either & ~np.isin(np.arange(len(kernels)), of)]
    found: pd.DataFrame = pd.concat([alone, several], ignore_index=True)
    return found


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


# They end at one instant for every member: no rank has the result before the last has given its part.
SYNCHRONOUS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "barrier")

# More than this share of collectives that do not overlap on all their ranks, or of receives that had ended before their
# send began, is no match.
MISMATCHED = 0.1

# Horovod's marks are of the waiting: the last rank to ask finds the result, and asks just after the others got theirs,
# by less than this share of the time from one collective to the next.
_JUST_AFTER = 0.01

# A matched pair of a send and its receive; its `members` are the sender and the receiver.
SENT = "send"

# Why sends and receives have no partner.
NO_PEERS = (
    "the trace does not record between which ranks data is sent and received (NCCL's does; gloo's, with more than two"
    " ranks, only with --shapes)"
)
NO_PAIRS = "sends and receives do not match, in number or in time, or their hosts' clocks are not known"

# One rank gives, the others receive and wait for it alone; or all give, and only the one that receives waits.
_FROM_ONE = ("broadcast", "scatter")
_TO_ONE = ("reduce", "gather")

_EVERY_RANK = "waiting shows only with every rank's trace"
_NEVER = np.iinfo(np.int64).max


@across_ranks
def instances(collectives: Frame = needs(collectives), job: Job = needs(JOB)) -> pd.DataFrame:
    """Return the rows of `collectives` with instance, the same number for the same collective on all ranks.

    They match by their number in their process group (torch counts alike on all its ranks); where the trace lacks it,
    by step, process group, kind and order, and where no group is known by stream too, if all ranks use their streams
    alike. A send and its receive match by step, the two ranks, process group and order, if both ranks have as many of
    them (is_sender: which is which). `row` is a row's place in `collectives`, `present` how many ranks have the
    instance, `wanted` how many took part in it (0: unknown). Raises NotMeasured where nothing could match.
    """
    if not len(collectives):
        raise NotMeasured(NO_COLLECTIVES) if job.world_size > 1 else DoesNotApply(ONE_RANK)
    frame = _paired(collectives.assign(row=np.arange(len(collectives))))
    if not len(frame):
        raise NotMeasured(NO_PEERS if (collectives["peer"] < 0).all() else NO_PAIRS)
    counted = (frame["sequence"] >= 0) & (frame["collective"] != SENT)
    named = (frame["group"] != "") | (frame["members"] != "")
    by_stream = ~counted & ~named
    frame = frame.assign(
        # For a numbered collective neither the step nor the stream matters.
        in_step=frame["step"].where(~counted, -1),
        number=frame["sequence"].where(counted, -1),
        stream=_streams(frame).where(by_stream, -1) if by_stream.any() else -1,
        communicator=frame["communicator"].where(~named, ""),
    )
    key = ["in_step", "number", "communicator", "stream", "group", "members", "collective"]
    frame = frame.assign(order=frame.groupby(["rank", *key], sort=False).cumcount())
    instance = frame.groupby([*key, "order"]).ngroup()
    size = frame["members"].str.count(",") + 1
    return frame.assign(
        instance=instance,
        present=instance.map(instance.value_counts()),
        wanted=np.select([frame["members"] == "", frame["members"] == NOBODY], [job.world_size, 0], size),
    )


@across_ranks
def matched(
    instances: Maybe[Frame] = maybe(instances), collectives: Maybe[Frame] = maybe(collectives), job: Job = needs(JOB)
) -> pd.DataFrame:
    """Match the collectives of all ranks: the rows of `instances`, with wait_ns, and last (whether it arrived last).

    begin_ns and done_ns are its start and end on aligned clocks, offset_ns what the rank's clock is ahead by.
    wait_ns = latest begin − own begin, never longer than the collective. Sends and receives that do not match are left
    out, see `unmatched`. Raises NotMeasured where there is none, a rank is missing, or they do not match.
    """
    missing = f"{len(job.missing_ranks)} of {job.world_size} ranks missing"
    if len(job.ranks) < 2:
        if job.world_size < 2:
            raise DoesNotApply(ONE_RANK)
        raise NotMeasured(f"{_EVERY_RANK}: {missing}")
    frame = instances.get()
    if collectives.lacking:
        rank, why = next(iter(collectives.lacking.items()))
        raise NotMeasured(f"{_EVERY_RANK}; of rank {rank}: {why}")
    if not frame["wanted"].any():
        raise NotMeasured(NO_GROUP)
    frame = frame[frame["present"] == frame["wanted"]]
    if not len(frame):
        unlike = "the ranks' collectives do not match in number"
        raise NotMeasured(f"{_EVERY_RANK}: {missing}" if job.missing_ranks else unlike)
    clocks = _clocks(job, frame).set_index("rank")
    offset = frame["rank"].map(clocks["ahead_ns"])
    frame = frame.assign(offset_ns=offset, begin_ns=frame["start_ns"] - offset, done_ns=frame["end_ns"] - offset)
    frame = frame[_fits(frame, clocks["host"])]
    if not len(frame):
        raise NotMeasured(NO_PAIRS)
    until, last = _releases(frame)
    all_wait = frame["collective"].isin((*SYNCHRONOUS, ""))
    each = frame.groupby("rank")["begin_ns"]
    gaps = each.size() - 1
    spacing = ((each.max() - each.min()) / gaps.where(gaps > 0)).min()  # from one to a rank's next
    apart = (until > frame["done_ns"] + _JUST_AFTER * float(np.nan_to_num(spacing)))[all_wait].mean()
    if apart > MISMATCHED:
        raise NotMeasured(f"the ranks' collectives do not match: {apart:.0%} of them do not overlap in time")
    wait = (until - frame["begin_ns"]).clip(lower=0, upper=frame["done_ns"] - frame["begin_ns"])
    return frame.assign(wait_ns=wait, last=last)


def _fits(frame: pd.DataFrame, hosts: pd.Series[str]) -> pd.Series[bool]:
    """Return which rows are a match. Sends and receives all match if no receive ends before its send begins, else none.

    Between hosts, this needs clocks that collectives align.
    """
    sent = frame["collective"] == SENT
    receives = frame[sent & ~frame["is_sender"]]
    begun = frame[sent & frame["is_sender"]].set_index("instance")["begin_ns"]
    early = receives["instance"].map(begun) > receives["done_ns"]
    fine = len(early) > 0 and early.mean() <= MISMATCHED
    synchronous = bool(frame["collective"].isin(SYNCHRONOUS).any())
    apart = frame["rank"].map(hosts).groupby(frame["instance"]).transform("nunique") > 1
    fits: pd.Series[bool] = ~sent | ((~apart | synchronous) & fine)
    return fits


def _releases(frame: pd.DataFrame) -> tuple[pd.Series[int], pd.Series[bool]]:
    """Return for each matched row until when its rank had to wait, and whether the others waited for it.

    Where one gives or one receives, a rank that left before the last had arrived did not wait for it (a sender may be
    rid of its bytes early): in a broadcast it waited at most for the source, the first rank that had begun before any
    was done.
    """
    begin, done, by = frame["begin_ns"], frame["done_ns"], frame["instance"]
    latest = begin.groupby(by).transform("max")
    from_one = frame["collective"].isin(_FROM_ONE)
    left = (from_one | frame["collective"].isin((*_TO_ONE, SENT))) & (done < latest)
    first = frame["rank"].where(begin <= done.groupby(by).transform("min"), _NEVER)
    is_source = frame["rank"] == first.groupby(by).transform("min")
    given = begin.where(is_source, -_NEVER).groupby(by).transform("max")
    until = latest.where(~left, begin.where(~from_one | (begin > given), given))
    stayed = (~left & (begin < latest)).groupby(by).transform("any")
    return until, is_source.where(from_one & ~stayed, begin == latest)


def _streams(frame: pd.DataFrame) -> pd.Series[int]:
    """Return the stream of each row where all ranks have as many of its kind on it in that step; else −1."""
    by = ["step", "collective", "stream"]
    each = frame.groupby(["rank", *by]).size().groupby(level=by)
    alike = (each.nunique() == 1) & (each.size() == frame["rank"].nunique())
    return frame["stream"].where(alike.reindex(pd.MultiIndex.from_frame(frame[by])).to_numpy(), -1)


def _paired(frame: pd.DataFrame) -> pd.DataFrame:
    """Return sends and receives with one name and their two ranks as members, without those that have no partner."""
    sends, sent = frame["collective"] == "send", frame["collective"].isin(POINT_TO_POINT)
    frame = frame.assign(is_sender=sends)
    if not sent.any():
        return frame
    mine, theirs = frame["rank"].astype("str"), frame["peer"].astype("str")
    frame = frame.assign(
        members=frame["members"].mask(sent, (mine + "," + theirs).where(sends, theirs + "," + mine)),
        collective=frame["collective"].mask(sent, SENT),
    )
    of_pair = frame[sent].groupby(["step", "group", "members"])["is_sender"]
    even = (of_pair.transform("mean") == 0.5) & (frame["peer"][sent] >= 0)
    return frame[even.reindex(frame.index, fill_value=True)]


@across_ranks
def unmatched(collectives: Maybe[Frame] = maybe(collectives), matched: Maybe[Frame] = maybe(matched)) -> str:
    """Return why some are not matched; "" where there are none, or all are."""
    frame, pairs = collectives.or_none(), matched.or_none()
    if frame is None:
        return ""
    why = [NO_GROUP] if (frame["members"] == NOBODY).any() else []
    sent = frame[frame["collective"].isin(POINT_TO_POINT)]
    if len(sent) and (sent["peer"] < 0).all():
        why.append(NO_PEERS)
    elif len(sent) and (pairs is None or SENT not in set(pairs["collective"])):
        why.append(NO_PAIRS)
    return "; ".join(why)


def _clocks(job: Job, frame: pd.DataFrame) -> pd.DataFrame:
    """Return for each rank its host, what its clock is ahead by (ahead_ns) and how far that is off (residual_ns).

    Synchronous collectives end at one instant: a host's clock is ahead by the median difference of its ranks' ends from
    everybody's median, and the residual is the median size of the rest. Ranks of unknown hosts have a clock each.
    """
    synchronous = frame[frame["collective"].isin(SYNCHRONOUS)]
    frame = synchronous if len(synchronous) else frame[frame["collective"] != SENT]
    # Differences, not Unix times: a float resolves today's only to 256 ns.
    after = frame["end_ns"] - frame.groupby("instance")["end_ns"].transform("min")
    difference = after - after.groupby(frame["instance"]).transform("median")
    hosts = {r: settings.host(job, r) or f"rank {r}" for r in job.ranks}
    host = frame["rank"].map(hosts)
    ahead = difference.groupby(host).median() * (len(set(hosts.values())) > 1)
    left = (difference - host.map(ahead)).abs().groupby(host).median()
    clocks = pd.DataFrame({"rank": job.ranks, "host": hosts.values()})
    return clocks.assign(
        ahead_ns=clocks["host"].map(ahead).fillna(0.0).round().astype(np.int64), residual_ns=clocks["host"].map(left)
    )


@across_ranks
def host_clocks(matched: Frame = needs(matched), job: Job = needs(JOB)) -> pd.DataFrame:
    """Return for each rank its host, what its clock is ahead by (ahead_ns) and how far that is off (residual_ns)."""
    return _clocks(job, matched)


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
    found, bare = np.zeros(len(ranks), dtype=np.int64), _by_rank(exposed)
    for rank, mine in places(ranks).items():
        if rank in bare:
            found[mine] = iv.within(bare[rank], start[mine], stop[mine])
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
        (exposed["end_ns"] - exposed["start_ns"]).groupby([exposed["rank"], exposed["step"]]).sum().rename("exposed_ns")
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
