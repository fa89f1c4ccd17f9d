"""Collectives, sends and receives: those of each rank, and matched over all ranks, who waited in them for whom.

Collectives match by process group and order, a send and its receive by the two ranks and their order. On clocks brought
together, the last to arrive is the one that the others waited for: wait = latest start − own start. What is left of a
rank's communication is transfer. Where only one rank gives, as in a broadcast, it is the one that is waited for; where
only one receives, it is the one that waits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import intervals as iv
from dlprof.engine import Measured, RankData, across_ranks, per_rank
from dlprof.errors import NotMeasured
from dlprof.measures import breakdown
from dlprof.measures.point_to_point import POINT_TO_POINT, point_to_point
from dlprof.readers.patterns import EXPERT_KERNEL
from dlprof.timeline import device, host
from dlprof.timeline.launches import UNKNOWN, launches
from dlprof.timeline.steps import launched_within, timing

Nanoseconds = NDArray[np.int64]

# Their end is one instant for every member: nobody has the result before the last has given its part.
SYNCHRONOUS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "barrier")

# Matched collectives must overlap in time on all their ranks; where more than this share does not, it was no match.
# Nor was it where so many receives had ended before their send began.
MISMATCHED = 0.1

# Where a mark is of the waiting (Horovod's), whoever asks last finds it done, and asks just after the others had their
# answer: by less than this share of the time from one collective to the next.
_JUST_AFTER = 0.01

# A send and its receive together, once they are matched; its `members` are the sender and the receiver.
SENT = "send"

# Why sends and receives have no partner.
UNTOLD = (
    "the trace does not tell between which ranks is sent and received (NCCL's does; gloo's, with more than two ranks,"
    " only with --shapes)"
)
NO_PAIRS = "sends and receives do not match, in number or in time, or their hosts' clocks are not known"

# What stands in place of its members where nobody knows who takes part in a collective.
NOBODY = "?"
NO_GROUP = (
    "expert-parallel kernels whose group the trace does not tell, or that do not wait for the others (low latency)"
)

# Expert-parallel kernels tell no group. Megatron-LM and DeviceMesh name theirs (EXPERT_MODEL_PARALLEL_GROUP, mesh_ep);
# what spans their replicas or other stages is a wider one. Those of low latency send in one kernel, and receive in
# another.
_EXPERTS = re.compile(EXPERT_KERNEL)
_OF_EXPERTS = re.compile(r"(?i)(?:^|[\W_])(?:ep|expert)(?:$|[\W_])")
_WIDER = re.compile(r"(?i)data|pipeline|(?:^|[\W_])e?[dp]p(?:$|[\W_])")
_LOW_LATENCY = re.compile(r"internode_ll::|::(?:dispatch|combine)_ll\b")

# One rank gives, the others receive and wait for it alone; or all give, and only the one that receives waits.
_FROM_ONE = ("broadcast", "scatter")
_TO_ONE = ("reduce", "gather")


@per_rank
def collectives(rank: RankData) -> pd.DataFrame:
    """Return the collectives, sends and receives that the steady traced steps made, in their order.

    Columns: step, group, members, collective, peer, bytes, dtype, sequence (−1: not told), communicator ("": not told),
    stream (among the rank's that communicate, in order of their first use), made_ns (the launch, where it is known),
    start_ns, end_ns. `members` are the ranks of the process group as text, "" where it is that of all ranks, NOBODY
    where it is not known; `peer` is the other rank of a send or receive, −1 where it is none or not told. From the
    device's kernels where there is a device, each with the step that launched it, else from the host's (gloo: from
    issue to completion). Empty where the rank has none.
    """
    spans = rank.table("spans")
    t = timing(rank)
    between = point_to_point(rank)
    of = host.is_kind(spans, "communication") & ~host.is_one_of(spans["collective"], *POINT_TO_POINT)
    of[between["row"].to_numpy(dtype=np.int64)] = False
    on_device = device.has_device(rank)
    if on_device:
        of &= host.is_on_device(rank)
    else:
        of &= (
            ~host.is_on_device(rank) & ~host.is_named(spans, "c10d", "_c10d") & ~host.is_one_of(spans["collective"], "")
        )
    rows = np.concatenate((np.flatnonzero(of), between["row"].to_numpy(dtype=np.int64)))
    told = ["group", "collective", "peer", "bytes", "dtype", "start_ns", "dur_ns"]
    chosen = spans[[*told, "name"]][of].astype({"group": "str", "collective": "str", "dtype": "str"})
    if len(between):
        chosen = pd.concat([chosen, between[told]])
    start = chosen["start_ns"].to_numpy()
    made, window = _made(rank, rows, start) if on_device else (start, _window_of(t.windows, start))
    keep = np.flatnonzero(window >= 0)
    keep = keep[np.argsort(made[keep], kind="stable")]
    rows, chosen, made, start, window = rows[keep], chosen.iloc[keep], made[keep], start[keep], window[keep]
    numbers = t.numbers if len(t.numbers) else np.arange(max(len(t.windows), 1), dtype=np.int64)
    lane = spans["lane"].array.codes[rows]
    return pd.DataFrame(
        {
            "step": numbers[window],
            "group": chosen["group"].to_numpy(),
            "members": _members_of(rank, chosen),
            "collective": chosen["collective"].to_numpy(),
            "peer": chosen["peer"].to_numpy(),
            "bytes": chosen["bytes"].to_numpy(),
            "dtype": chosen["dtype"].to_numpy(),
            "sequence": spans["sequence"].to_numpy()[rows],
            "communicator": spans["communicator"].astype("str").to_numpy()[rows],
            "stream": pd.factorize(lane)[0].astype(np.int64),
            "made_ns": made,
            "start_ns": start,
            "end_ns": start + chosen["dur_ns"].to_numpy(),
        }
    )


def _window_of(windows: iv.Intervals, start: Nanoseconds) -> Nanoseconds:
    """Return the place of the window in which each instant lies, −1: none."""
    if not len(windows):
        return np.full(len(start), -1, dtype=np.int64)
    window = np.searchsorted(windows[:, 0], start, side="right") - 1
    return np.where((window >= 0) & (start < windows[np.maximum(window, 0), 1]), window, -1)


def _made(rank: RankData, rows: Nanoseconds, start: Nanoseconds) -> tuple[Nanoseconds, Nanoseconds]:
    """Return for rows of device work in the spans the launch (their start where it is not known) and their step's
    place.
    """
    work = device.device_work(rank)
    at = np.searchsorted(work.index.to_numpy(), rows)
    called = launches(rank).called[at]
    return np.where(called < UNKNOWN, called, start), launched_within(rank)[at]


def _members_of(rank: RankData, rows: pd.DataFrame) -> NDArray[Any]:
    """Give the ranks of each row's group, as text."""
    groups = rank.trace_facts.get("groups") or {}
    world = int(rank.trace_facts.get("world_size") or rank.facts.get("world_size") or 0)
    members = rows["group"].map({g: _members(groups.get(g)) for g in rows["group"].unique()}).to_numpy(dtype=object)
    experts = [n for n in rows["name"].unique() if _EXPERTS.search(str(n))]
    if experts:
        several = any(1 < int(g.get("size") or 0) < world for g in groups.values())
        theirs = (rows["group"] == "") & rows["name"].isin(experts)
        members[theirs.to_numpy()] = _experts(rank, groups) if several else ""
        members[rows["name"].isin([n for n in experts if _LOW_LATENCY.search(str(n))]).to_numpy()] = NOBODY
    return members


def _experts(rank: RankData, groups: Mapping[str, Any]) -> str:
    """Give the ranks among which this one's experts are spread, as text: the largest group that is named for them."""
    known = [
        g.get("ranks") or []
        for g in groups.values()
        if _OF_EXPERTS.search(str(g.get("desc") or "")) and not _WIDER.search(str(g.get("desc")))
    ]
    mine = [ranks for ranks in known if rank.index in ranks]
    return ",".join(map(str, max(mine, key=len))) if mine else NOBODY


def _members(group: Any) -> str:
    ranks = (group or {}).get("ranks") or ()
    return ",".join(map(str, ranks))


@per_rank
def exposed(rank: RankData) -> pd.DataFrame:
    """Give when, in the steady traced steps, this rank communicates and computes nothing: step, start_ns, end_ns."""
    t = timing(rank)
    numbers = t.numbers if len(t.numbers) else np.zeros(len(t.windows), dtype=np.int64)
    when = breakdown.exposed_communication(rank)
    rows = [(n, iv.clip(when, int(s), int(e))) for n, (s, e) in zip(numbers, t.windows, strict=True)]
    return pd.DataFrame(
        {
            "step": np.concatenate([np.full(len(w), n) for n, w in rows]) if rows else np.empty(0, dtype=np.int64),
            "start_ns": np.concatenate([w[:, 0] for _, w in rows]) if rows else np.empty(0, dtype=np.int64),
            "end_ns": np.concatenate([w[:, 1] for _, w in rows]) if rows else np.empty(0, dtype=np.int64),
        }
    )


@per_rank
def traced_steps(rank: RankData) -> pd.DataFrame:
    """Give the steady traced steps: step, dur_ns, loose_ns.

    loose_ns is the light layer's time outside the backward pass, in which gradients are exchanged, less its mean over
    the steady steps: by how much more than usual this rank did of its own in this step. NaN where not recorded.
    """
    t = timing(rank)
    numbers = t.numbers if len(t.numbers) else np.zeros(len(t.windows), dtype=np.int64)
    frame = pd.DataFrame({"step": numbers, "dur_ns": t.windows[:, 1] - t.windows[:, 0]})
    if t.source != "steps" or not t.phases.get("backward") or device.has_device(rank):
        return frame.assign(loose_ns=np.nan)
    light = rank.table("steps").drop_duplicates("step").set_index("step")
    loose = light["dur_ns"] - light["backward_ns"]
    return frame.assign(loose_ns=loose.reindex(numbers).to_numpy() - (t.step_ns - t.phases["backward"]))


@across_ranks(collectives)
def matched(run: Measured) -> pd.DataFrame:
    """Match the collectives of all ranks: the rows of `instances`, with wait_ns, and last (who is waited for).

    wait_ns = latest start − own start on clocks brought together; never longer than the collective. offset_ns is what
    the rank's clock is ahead by. Sends and receives that do not match are left out, as `unmatched` tells. Raises
    NotMeasured where there is none, a rank is missing, or they do not match.
    """
    if len(run.ranks) < 2:
        alone = run.world_size < 2
        raise NotMeasured("one rank: nobody to wait for" if alone else _lacking(run))
    frame = instances(run)
    lacking = run.lacking(collectives)
    if lacking:
        rank, why = next(iter(lacking.items()))
        raise NotMeasured(f"waiting shows only with every rank's trace; of rank {rank}: {why}")
    if not frame["wanted"].any():
        raise NotMeasured(NO_GROUP)
    frame = frame[frame["present"] == frame["wanted"]]
    if not len(frame):
        raise NotMeasured(_lacking(run) if run.missing_ranks else "the ranks' collectives do not match in number")
    clocks = _clocks(run, frame).set_index("rank")
    offset = frame["rank"].map(clocks["ahead_ns"]).to_numpy(dtype=np.int64)
    start = np.asarray(frame["start_ns"], dtype=np.int64) - offset
    end = np.asarray(frame["end_ns"], dtype=np.int64) - offset
    fits = _fits(frame, start, end, clocks["host"])
    if not fits.any():
        raise NotMeasured(NO_PAIRS)
    frame, offset, start, end = frame[fits], offset[fits], start[fits], end[fits]
    until, last = _releases(frame, start, end)
    all_wait = frame["collective"].isin((*SYNCHRONOUS, "")).to_numpy()
    apart = (until > end + _JUST_AFTER * _spacing(frame["rank"].to_numpy(), start))[all_wait]
    if len(apart) and np.mean(apart) > MISMATCHED:
        raise NotMeasured(f"the ranks' collectives do not match: {np.mean(apart):.0%} of them do not overlap in time")
    wait = np.clip(until - start, 0, end - start).astype(np.int64)
    return frame.assign(wait_ns=wait, last=last, offset_ns=offset)


def _spacing(ranks: NDArray[np.int64], start: Nanoseconds) -> float:
    """Give the mean time from the start of a rank's collective to that of its next, ns; 0 where each has one."""
    each = pd.Series(start).groupby(ranks)
    n = each.count() - 1
    return float(((each.max() - each.min()) / n.where(n > 0)).min()) if (n > 0).any() else 0.0


def _fits(frame: pd.DataFrame, start: Nanoseconds, end: Nanoseconds, hosts: pd.Series[str]) -> NDArray[np.bool_]:
    """Tell which matched rows can be one: of sends and receives, all or none.

    No receive ends before its send begins. Between hosts that shows only on clocks that collectives brought together.
    """
    sent = (frame["collective"] == SENT).to_numpy()
    if not sent.any():
        return ~sent
    apart = frame["rank"].map(hosts).groupby(frame["instance"]).transform("nunique").to_numpy() > 1
    together = frame["collective"].isin(SYNCHRONOUS).any()
    by = frame["instance"].to_numpy()
    begun = pd.Series(np.where(frame["is_sender"], start, np.iinfo(np.int64).min)).groupby(by).transform("max")
    wrong = (begun.to_numpy() > end)[sent & ~frame["is_sender"].to_numpy()]
    fine = np.mean(wrong) <= MISMATCHED if len(wrong) else False
    told: NDArray[np.bool_] = ~sent | (fine & (together | ~apart))
    return told


def _releases(frame: pd.DataFrame, start: Nanoseconds, end: Nanoseconds) -> tuple[Nanoseconds, NDArray[np.bool_]]:
    """Give for each matched row until when its rank had to wait, and whether it is the one that was waited for.

    Where one gives or one receives, who left before the last had come did not wait for it: of a broadcast it waited
    for the giver at most, which is taken to be the first rank that had begun before anybody was done. A sender may be
    rid of its bytes before they are asked for.
    """
    by = frame["instance"].to_numpy()
    latest = pd.Series(start).groupby(by).transform("max").to_numpy()
    earliest_end = pd.Series(end).groupby(by).transform("min").to_numpy()
    rooted = frame["collective"].isin((*_FROM_ONE, *_TO_ONE, SENT)).to_numpy()
    from_one = frame["collective"].isin(_FROM_ONE).to_numpy()
    ranks = frame["rank"].to_numpy()
    giver = np.where(start <= earliest_end, ranks, np.iinfo(np.int64).max)
    one = ranks == pd.Series(giver).groupby(by).transform("min").to_numpy()
    given = pd.Series(np.where(one, start, np.iinfo(np.int64).min)).groupby(by).transform("max").to_numpy()
    left = rooted & (end < latest)
    until = np.where(left, np.where(from_one, np.maximum(given, start), start), latest)
    stayed = pd.Series(~left & (start < latest)).groupby(by).transform("any").to_numpy()
    return until, np.where(from_one & ~stayed, one, start == latest)


def instances(run: Measured) -> pd.DataFrame:
    """Return the rows of `collectives` with instance, the same number for the same collective on all ranks.

    They match by their number in their process group where the trace tells it (torch counts a group's collectives alike
    on all its ranks). Else by the step that made them, process group, kind and order; where no group is told, by stream
    too, if all ranks use their streams alike. A send and its receive match by step, the two ranks, process group and
    order, where both ranks have as many of them (is_sender tells which is which). `row` is a row's own place in
    `collectives`, `present` how many ranks have the instance and `wanted` how many took part in it (0: not known).
    Raises NotMeasured where there is nothing that could match.
    """
    frame = run.frame(collectives)
    if not len(frame):
        raise NotMeasured("no collectives in the traced steps")
    frame = _paired(frame.assign(row=np.arange(len(frame))))
    if not len(frame):
        raise NotMeasured(UNTOLD if (run.frame(collectives)["peer"] < 0).all() else NO_PAIRS)
    counted = (frame["sequence"] >= 0) & (frame["collective"] != SENT)
    named = (frame["group"] != "") | (frame["members"] != "")
    frame = frame.assign(
        # Of a numbered collective neither the step nor the stream matters.
        in_step=frame["step"].where(~counted, -1),
        number=frame["sequence"].where(counted, -1),
        stream=_streams(frame).where(~counted & ~named, -1),
        communicator=frame["communicator"].where(~named, ""),
    )
    key = ["in_step", "number", "communicator", "stream", "group", "members", "collective"]
    order = frame.groupby(["rank", *key], sort=False).cumcount()
    frame = frame.assign(order=order)
    instance = frame.groupby([*key, "order"]).ngroup()
    said = frame["members"].str.count(",") + 1
    return frame.assign(
        instance=instance,
        present=instance.map(instance.value_counts()),
        wanted=np.select([frame["members"] == "", frame["members"] == NOBODY], [run.world_size, 0], said),
    )


def _streams(frame: pd.DataFrame) -> pd.Series[int]:
    """Return the stream of each row where all ranks have as many of its kind on it in that step; else −1."""
    by = ["step", "collective", "stream"]
    counts = frame.groupby(["rank", *by]).size()
    ranks = frame["rank"].nunique()
    each = counts.groupby(level=by)
    alike = (each.nunique() == 1) & (each.size() == ranks)
    told = alike.reindex(pd.MultiIndex.from_frame(frame[by])).to_numpy()
    return frame["stream"].where(pd.Series(told, index=frame.index), -1)


def _paired(frame: pd.DataFrame) -> pd.DataFrame:
    """Give sends and receives one name and their two ranks as members, and leave out those that have no partner."""
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


def unmatched(run: Measured) -> str:
    """Say why some are not matched; "" where there are none, or all are."""
    try:
        frame = run.frame(collectives)
    except NotMeasured:
        return ""
    why = [NO_GROUP] if (frame["members"] == NOBODY).any() else []
    sent = frame[frame["collective"].isin(POINT_TO_POINT)]
    if len(sent) and (sent["peer"] < 0).all():
        why.append(UNTOLD)
    elif len(sent):
        paired = False
        with suppress(NotMeasured):
            paired = bool((run.frame(matched)["collective"] == SENT).any())
        why += [] if paired else [NO_PAIRS]
    return "; ".join(why)


def _lacking(run: Measured) -> str:
    missing = run.missing_ranks
    return f"waiting shows only with every rank's trace; {len(missing)} of {run.world_size} are not here"


def _clocks(run: Measured, frame: pd.DataFrame) -> pd.DataFrame:
    """Tell for each rank its host, what its clock is ahead by (ahead_ns) and how far that is off (residual_ns).

    Collectives that end for all at once end at one instant: a host's clock is ahead by the median difference of its
    ranks' ends from everybody's median, and what differs still is the residual, its median size. Ranks on one host have
    one clock; ranks whose host is not told have a clock each.
    """
    synchronous = frame[frame["collective"].isin(SYNCHRONOUS)]
    frame = synchronous if len(synchronous) else frame[frame["collective"] != SENT]
    # Whole ns throughout: a float of today's Unix time knows but every 256th.
    first = frame.groupby("instance")["end_ns"].transform("min")
    after = frame["end_ns"] - first
    difference = after - after.groupby(frame["instance"]).transform("median")
    hosts = {r: str(run.facts[r].get("host") or run.trace_facts[r].get("host") or f"rank {r}") for r in run.ranks}
    host = frame["rank"].map(hosts)
    ahead = difference.groupby(host).median() * (len(set(hosts.values())) > 1)
    left = (difference - host.map(ahead)).abs().groupby(host).median()
    clocks = pd.DataFrame({"rank": run.ranks, "host": [hosts[r] for r in run.ranks]})
    return clocks.assign(
        ahead_ns=clocks["host"].map(ahead).fillna(0.0).round().astype(np.int64), residual_ns=clocks["host"].map(left)
    )


@across_ranks(collectives, exposed)
def bare_waits(run: Measured) -> pd.DataFrame:
    """Give the rows of `matched` with waited_ns, and by, the rank that came last to the same collective.

    waited_ns is what of wait_ns its rank had no computation beside; of waits that overlap the time is the earliest
    one's. Raises NotMeasured as `matched` does.
    """
    pairs = run.frame(matched)
    rank, begin = pairs["rank"].to_numpy(), pairs["start_ns"].to_numpy()
    bare = exposed_between(run, rank, begin, begin + pairs["wait_ns"].to_numpy())
    return pairs.assign(waited_ns=bare, by=rank[culprits(pairs)])


@across_ranks(collectives)
def host_clocks(run: Measured) -> pd.DataFrame:
    """Tell for each rank its host, what its clock is ahead by (ahead_ns) and how far that is off (residual_ns), in ns.

    Raises NotMeasured as `matched` does.
    """
    return _clocks(run, run.frame(matched))


def waiting(run: Measured) -> dict[int, iv.Intervals]:
    """Give when, in the steady traced steps, each rank waited for another and computed nothing meanwhile.

    Raises NotMeasured as `matched` does.
    """
    pairs = run.frame(matched)
    until = pairs.assign(until_ns=pairs["start_ns"] + pairs["wait_ns"])
    waited = {int(str(r)): _set(g, "until_ns") for r, g in until.groupby("rank")}
    return {r: iv.intersect(waited.get(r, iv.EMPTY), bare) for r, bare in _exposed_of(run).items()}


def exposed_waits(run: Measured) -> Nanoseconds:
    """Give for each row of `matched` what waiting in it cost its rank, ns: waiting, and what that laid open.

    Waiting counts where the rank computed nothing meanwhile; where it waits in several collectives at once, the time
    is the earliest one's, so that of each rank they add up. A transfer that nothing hides here, but that computation of
    the last to come hides there, is open only because this rank is ahead. Such transfers count as far as this rank had
    computed while it waited: without the waiting, that would have hidden them.
    """
    pairs = run.frame(bare_waits)
    rank, begin, end = (pairs[name].to_numpy() for name in ("rank", "start_ns", "end_ns"))
    until, waited = begin + pairs["wait_ns"].to_numpy(), pairs["waited_ns"].to_numpy()
    bare = exposed_between(run, rank, until, end)
    rows = pd.DataFrame({"rank": rank, "step": pairs["step"].to_numpy()})
    rows = rows.assign(
        waited=waited,
        hidden=_apart(rank, begin, until) - waited,
        opened=np.maximum(bare - bare[culprits(pairs)], 0),
    )
    of_step = rows.groupby(["rank", "step"]).sum().join(_bare_of_steps(run), how="left")
    room = of_step["exposed_ns"] - of_step["waited"]
    most = of_step["hidden"].where(of_step["hidden"] < room, room).clip(lower=0)
    share = (most / of_step["opened"].replace(0, np.nan)).clip(upper=1.0).fillna(0.0)
    part = share.reindex(pd.MultiIndex.from_frame(rows[["rank", "step"]])).to_numpy()
    found: Nanoseconds = waited + np.rint(rows["opened"].to_numpy() * part).astype(np.int64)
    return found


def culprits(pairs: pd.DataFrame) -> Nanoseconds:
    """Give for each matched row the place of the row of the rank that came last to the same collective."""
    instance, last = pairs["instance"].to_numpy(), pairs["last"].to_numpy()
    row_of = np.zeros(instance.max() + 1, dtype=np.int64)
    at = np.flatnonzero(last)[::-1]  # of several, the first rank
    row_of[instance[at]] = at
    found: Nanoseconds = row_of[instance]
    return found


def exposed_between(run: Measured, ranks: Nanoseconds, begin: Nanoseconds, end: Nanoseconds) -> Nanoseconds:
    """Give how much of some times of some ranks is exposed communication, ns; of times that overlap the earliest's."""
    found = np.zeros(len(ranks), dtype=np.int64)
    for rank, intervals in _exposed_of(run).items():
        at, start, until = _one_after_the_other(ranks, rank, begin, end)
        found[at] = iv.within(intervals, start, until)
    return found


def _apart(ranks: Nanoseconds, begin: Nanoseconds, end: Nanoseconds) -> Nanoseconds:
    """Give how long some times of some ranks are, ns; of times that overlap the earliest's."""
    found = np.zeros(len(ranks), dtype=np.int64)
    for rank in np.unique(ranks):
        at, start, until = _one_after_the_other(ranks, int(rank), begin, end)
        found[at] = until - start
    return found


def _one_after_the_other(
    ranks: Nanoseconds, rank: int, begin: Nanoseconds, end: Nanoseconds
) -> tuple[Nanoseconds, Nanoseconds, Nanoseconds]:
    """Give the places, starts and ends of a rank's times, each beginning where all before it have ended."""
    at = np.flatnonzero(ranks == rank)
    at = at[np.argsort(begin[at], kind="stable")]
    start, until = begin[at], end[at]
    start = np.maximum(start, np.concatenate((start[:1], np.maximum.accumulate(until)[:-1])))
    return at, start, np.maximum(start, until)


def _bare_of_steps(run: Measured) -> pd.Series[int]:
    when = run.frame(exposed)
    return when.assign(exposed_ns=when["end_ns"] - when["start_ns"]).groupby(["rank", "step"])["exposed_ns"].sum()


def _exposed_of(run: Measured) -> dict[int, iv.Intervals]:
    of = {int(str(r)): _set(g, "end_ns") for r, g in run.frame(exposed).groupby("rank")}
    return {r: of.get(r, iv.EMPTY) for r in run.ranks}


@across_ranks(collectives, exposed, traced_steps)
def waits(run: Measured) -> pd.DataFrame:
    """Tell what waiting for others cost each rank in each traced step.

    Columns: rank, step, dur_ns, loose_ns (see traced_steps), wait_ns (see exposed_waits), exposed_ns (all exposed
    communication), last, matched (how many of the step's matched collectives it came to last, and how many there were).
    A wait belongs to the step in which it begins. Raises NotMeasured as `matched` does.
    """
    pairs = run.frame(matched).assign(waited_ns=exposed_waits(run))
    of_step = pairs.groupby(["rank", "step"]).agg(
        wait_ns=("waited_ns", "sum"), last=("last", "sum"), matched=("last", "size")
    )
    steps = run.frame(traced_steps).join(of_step, on=["rank", "step"])
    steps = steps.join(_bare_of_steps(run), on=["rank", "step"])
    counted = ["wait_ns", "exposed_ns", "last", "matched"]
    steps[counted] = steps[counted].fillna(0).astype(np.int64)
    return steps[["rank", "step", "dur_ns", "loose_ns", *counted]]


def _set(frame: pd.DataFrame, end: str) -> iv.Intervals:
    return iv.union(frame["start_ns"].to_numpy(), frame[end].to_numpy())
