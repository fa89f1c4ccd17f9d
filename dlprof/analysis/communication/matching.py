"""Collectives, sends and receives matched over all ranks, and who waited in them for whom.

Collectives match by their number where the trace tells it, else by process group and order; a send and its receive by
the two ranks and their order. On clocks brought together, the last to arrive is the one that the others waited for:
wait = latest start − own start. What is left of a rank's communication is transfer. Where only one rank gives, as in a
broadcast, it is the one that is waited for; where only one receives, it is the one that waits.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import settings
from dlprof.analysis.communication.collectives import NO_GROUP, NOBODY, Nanoseconds
from dlprof.analysis.communication.point_to_point import POINT_TO_POINT
from dlprof.analysis.engine import Job, Maybe, across_ranks
from dlprof.errors import NotMeasured

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

# One rank gives, the others receive and wait for it alone; or all give, and only the one that receives waits.
_FROM_ONE = ("broadcast", "scatter")
_TO_ONE = ("reduce", "gather")


@across_ranks
def matched(instances: Maybe[pd.DataFrame], collectives: Maybe[pd.DataFrame], job: Job) -> pd.DataFrame:
    """Match the collectives of all ranks: the rows of `instances`, with wait_ns, and last (who is waited for).

    wait_ns = latest start − own start on clocks brought together; never longer than the collective. offset_ns is what
    the rank's clock is ahead by. Sends and receives that do not match are left out, as `unmatched` tells. Raises
    NotMeasured where there is none, a rank is missing, or they do not match.
    """
    if len(job.ranks) < 2:
        alone = job.world_size < 2
        raise NotMeasured("one rank: nobody to wait for" if alone else _lacking(job))
    frame = instances.get()
    lacking = collectives.lacking
    if lacking:
        rank, why = next(iter(lacking.items()))
        raise NotMeasured(f"waiting shows only with every rank's trace; of rank {rank}: {why}")
    if not frame["wanted"].any():
        raise NotMeasured(NO_GROUP)
    frame = frame[frame["present"] == frame["wanted"]]
    if not len(frame):
        raise NotMeasured(_lacking(job) if job.missing_ranks else "the ranks' collectives do not match in number")
    clocks = _clocks(job, frame).set_index("rank")
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
    """Return the mean time from the start of a rank's collective to that of its next, ns; 0 where each has one."""
    each = pd.Series(start).groupby(ranks)
    n = each.count() - 1
    return float(((each.max() - each.min()) / n.where(n > 0)).min()) if (n > 0).any() else 0.0


def _fits(frame: pd.DataFrame, start: Nanoseconds, end: Nanoseconds, hosts: pd.Series[str]) -> NDArray[np.bool_]:
    """Return which matched rows can be one: of sends and receives, all or none.

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
    """Return for each matched row until when its rank had to wait, and whether it is the one that was waited for.

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


@across_ranks
def instances(collectives: pd.DataFrame, job: Job) -> pd.DataFrame:
    """Return the rows of `collectives` with instance, the same number for the same collective on all ranks.

    They match by their number in their process group where the trace tells it (torch counts a group's collectives alike
    on all its ranks). Else by the step that made them, process group, kind and order; where no group is told, by stream
    too, if all ranks use their streams alike. A send and its receive match by step, the two ranks, process group and
    order, where both ranks have as many of them (is_sender tells which is which). `row` is a row's own place in
    `collectives`, `present` how many ranks have the instance and `wanted` how many took part in it (0: not known).
    Raises NotMeasured where there is nothing that could match.
    """
    frame = collectives
    if not len(frame):
        raise NotMeasured("no collectives in the traced steps")
    frame = _paired(frame.assign(row=np.arange(len(frame))))
    if not len(frame):
        raise NotMeasured(UNTOLD if (collectives["peer"] < 0).all() else NO_PAIRS)
    counted = (frame["sequence"] >= 0) & (frame["collective"] != SENT)
    named = (frame["group"] != "") | (frame["members"] != "")
    by_stream = ~counted & ~named
    frame = frame.assign(
        # Of a numbered collective neither the step nor the stream matters.
        in_step=frame["step"].where(~counted, -1),
        number=frame["sequence"].where(counted, -1),
        stream=_streams(frame).where(by_stream, -1) if by_stream.any() else -1,
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
        wanted=np.select([frame["members"] == "", frame["members"] == NOBODY], [job.world_size, 0], said),
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
    """Return sends and receives one name and their two ranks as members, and leave out those that have no partner."""
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
def unmatched(collectives: Maybe[pd.DataFrame], matched: Maybe[pd.DataFrame]) -> str:
    """Say why some are not matched; "" where there are none, or all are."""
    try:
        frame = collectives.get()
    except NotMeasured:
        return ""
    why = [NO_GROUP] if (frame["members"] == NOBODY).any() else []
    sent = frame[frame["collective"].isin(POINT_TO_POINT)]
    if len(sent) and (sent["peer"] < 0).all():
        why.append(UNTOLD)
    elif len(sent):
        paired = False
        with suppress(NotMeasured):
            paired = bool((matched.get()["collective"] == SENT).any())
        why += [] if paired else [NO_PAIRS]
    return "; ".join(why)


def _lacking(job: Job) -> str:
    missing = job.missing_ranks
    return f"waiting shows only with every rank's trace; {len(missing)} of {job.world_size} are not here"


def _clocks(job: Job, frame: pd.DataFrame) -> pd.DataFrame:
    """Return for each rank its host, what its clock is ahead by (ahead_ns) and how far that is off (residual_ns).

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
    hosts = {r: settings.host(job, r) or f"rank {r}" for r in job.ranks}
    host = frame["rank"].map(hosts)
    ahead = difference.groupby(host).median() * (len(set(hosts.values())) > 1)
    left = (difference - host.map(ahead)).abs().groupby(host).median()
    clocks = pd.DataFrame({"rank": job.ranks, "host": [hosts[r] for r in job.ranks]})
    return clocks.assign(
        ahead_ns=clocks["host"].map(ahead).fillna(0.0).round().astype(np.int64), residual_ns=clocks["host"].map(left)
    )


@across_ranks
def host_clocks(matched: pd.DataFrame, job: Job) -> pd.DataFrame:
    """Return for each rank its host, what its clock is ahead by (ahead_ns) and how far it is off (residual_ns), in ns.

    Raises NotMeasured as `matched` does.
    """
    return _clocks(job, matched)
