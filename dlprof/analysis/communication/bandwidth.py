"""How fast collectives move their bytes, by kind, group and size, next to the link's peak where that is known.

The transfer is the time that the last rank to arrive spends in a collective: the least over its ranks. Bytes over this
time are the algorithm bandwidth. The load on every rank's link is the bus bandwidth (nccl-tests' factors). It compares
with the link's peak for any collective and any number of ranks.

`links` finds slow links from large collectives: it compares each group's bandwidth with the link's peak and with
similar groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import settings
from dlprof.analysis.communication.collectives import (
    NO_SIZES,
    NOBODY,
    SENT,
    exposed,
    exposed_between,
    instances,
    matched,
    window_steps,
)
from dlprof.analysis.compute.peaks import nvlink
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, across_ranks, maybe, needs
from dlprof.analysis.step.breakdown import breakdown, part
from dlprof.errors import NotMeasured
from dlprof.result import Change, Setting
from dlprof.units import size

# Bounds of the classes of size, bytes: from one to the next, a transfer takes up to 16 times as long.
CLASSES = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 28)


@across_ranks
def transfers(
    matched: Maybe[Frame] = maybe(matched),
    instances: Maybe[Frame] = maybe(instances),
    exposed: Frame = needs(exposed),
    window_steps: Frame = needs(window_steps),
    breakdown: Frame = needs(breakdown),
) -> pd.DataFrame:
    """Return each collective of the traced steps once, whatever rank had it.

    Columns: collective, members, ranks (how many), size (index into CLASSES, −1: unknown), bytes, dtype, transfer_ns
    (where ranks are missing, at most), wait_ns (mean over its ranks, NaN: unknown), bare_ns (exposed transfer, mean
    over its ranks, scaled to the steady steps), late (the last to come, −1: unknown).
    """
    try:
        frame, known = matched.get(), True
    except NotMeasured:
        frame, known = instances.get().assign(wait_ns=0, last=False), False
    begin = (frame["start_ns"] + frame["wait_ns"]).to_numpy()
    bare = exposed_between(exposed, frame["rank"].to_numpy(), begin, frame["end_ns"].to_numpy())
    # Scale from the traced steps to the mean steady step.
    traced = (exposed["end_ns"] - exposed["start_ns"]).groupby(exposed["rank"]).sum()
    traced = traced / window_steps.groupby("rank").size()
    scale = (pd.Series(part(breakdown, "communication"), dtype=float) / traced).replace([np.inf, -np.inf], np.nan)
    dur = (frame["end_ns"] - frame["start_ns"]).astype(float)
    # A send may return long before the bytes arrive, so the receiver's time without its wait is the transfer.
    received = (dur - frame["wait_ns"]).mask(frame["is_sender"])
    frame = frame.assign(
        size=size_classes(frame["bytes"]),
        bare_ns=bare * frame["rank"].map(scale).fillna(0.0),
        dur_ns=dur.mask(frame["collective"] == SENT, received),
        late=frame["rank"].where(frame["last"], -1),
    )
    first = frame.drop_duplicates("instance").set_index("instance").sort_index()
    one = first[["collective", "members", "wanted", "size", "dtype"]].rename(columns={"wanted": "ranks"})
    each = frame.groupby("instance")
    one[["bytes", "late"]] = each[["bytes", "late"]].max()
    one["transfer_ns"] = each["dur_ns"].min()
    one[["wait_ns", "bare_ns"]] = each[["wait_ns", "bare_ns"]].mean()
    return one if known else one.assign(wait_ns=np.nan)


@across_ranks
def bandwidth(
    transfers: Frame = needs(transfers), window_steps: Frame = needs(window_steps), job: Job = needs(JOB)
) -> pd.DataFrame:
    """Sum up the collectives by kind, members and class of size, for the mean traced step.

    Columns: collective, members, ranks (how many; 0: unknown), size (index into CLASSES; −1: unknown), count (a step),
    bytes, transfer_ns (at most, where ranks are missing), wait_ns (mean over its ranks), exposed_ns (of transfer and
    rank, in the mean steady step), algbw, busbw and the link's peak (bytes/s), culprit, late (how many collectives it
    came last to) and matched (of how many). NaN and culprit −1: unknown.
    """
    steps = max(int(window_steps.groupby("rank").size().max()), 1)
    by = transfers.groupby(["collective", "members", "ranks", "size"])
    columns = ["bytes", "transfer_ns", "wait_ns", "bare_ns"]
    frame = by[columns].sum(min_count=1).rename(columns={"bare_ns": "exposed_ns"}).astype(float) / steps
    frame = frame.assign(count=by.size() / steps, matched=by.size()).reset_index()
    frame["bytes"] = frame["bytes"].where((frame["size"] >= 0) & (frame["transfer_ns"] > 0))
    algbw = frame["bytes"] / frame["transfer_ns"] * 1e9
    factor = [bus_factor(*of) if of[1] else np.nan for of in zip(frame["collective"], frame["ranks"], strict=True)]
    last = [of[of >= 0].value_counts() for _, of in by["late"]]
    return frame.assign(
        algbw=algbw,
        busbw=algbw * factor,
        peak=[_peak(job, members) for members in frame["members"]],
        culprit=[int(of.index[0]) if len(of) else -1 for of in last],
        late=[int(of.iloc[0]) if len(of) else 0 for of in last],
    ).sort_values("transfer_ns", ascending=False, ignore_index=True)


@across_ranks
def exchanged(bandwidth: Frame = needs(bandwidth)) -> pd.DataFrame:
    """Sum up `bandwidth` over groups of as many ranks: what a rank has of each kind and class of size, longest first.

    Columns: collective, ranks, size, groups (how many), count, bytes, wait_ns and transfer_ns (of a step, mean of the
    groups), algbw and busbw (bytes/s, of all their transfers), of_peak (busbw over the link's), and of the group that
    waits for one rank most often culprit, late and matched. NaN and culprit −1: unknown.
    """
    transfer = bandwidth["transfer_ns"]
    frame = bandwidth.assign(carried=bandwidth["busbw"] * transfer, moved=bandwidth["algbw"] * transfer)
    by = frame.groupby(["collective", "ranks", "size"])
    # If a value of one group is unknown, so is the sum.
    known = by[["carried", "moved", "peak"]].count().eq(by.size(), axis=0)
    sums, peak = by[["carried", "moved"]].sum().where(known), by["peak"].min().where(known["peak"])
    whole = by[["count", "bytes", "wait_ns", "transfer_ns"]].mean().assign(groups=by.size())
    total = by["transfer_ns"].sum().replace(0.0, np.nan)
    whole = whole.assign(algbw=sums["moved"] / total, busbw=sums["carried"] / total)
    whole["of_peak"] = whole["busbw"] / peak
    worst = frame.loc[by["late"].idxmax(), ["culprit", "late", "matched"]].set_index(whole.index)
    whole = whole.join(worst).reset_index()
    longest = (-(whole["transfer_ns"] + whole["wait_ns"].fillna(0.0))).argsort(kind="stable")
    return whole.iloc[longest].reset_index(drop=True)


def bus_factor(collective: str, ranks: int) -> float:
    """Return bus bandwidth over algorithm bandwidth, as nccl-tests defines it; an all-gather counts its output."""
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if collective in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0


def _peak(job: Job, members: str) -> float:
    """Return the peak of the link between some ranks in one direction, bytes/s; known only for NVLink in one host."""
    ranks = {int(r) for r in members.split(",")} if members not in ("", NOBODY) else set(range(job.world_size))
    if members == NOBODY or not ranks <= set(job.ranks):
        return np.nan
    hosts, names = ({of(job, r) for r in ranks} for of in (settings.host, settings.device))
    if len(hosts) != 1 or "" in hosts or len(names) != 1 or settings.through_host(job):
        return np.nan
    return nvlink(names.pop()) or np.nan


def size_classes(size: pd.Series[int]) -> NDArray[np.int64]:
    """Return the index into CLASSES of each size, bytes; −1: unknown."""
    classes: NDArray[np.int64] = np.where(size < 0, -1, np.searchsorted(CLASSES, size, side="right"))
    return classes


def size_class(index: int) -> str:
    """Write a class of size."""
    if index < 0:
        return "unknown size"
    words = [f"{bound >> 10} KiB" if bound < 1 << 20 else f"{bound >> 20} MiB" for bound in CLASSES]
    return f"below {words[index]}" if index < len(words) else f"{words[-1]} or more"


# Every rank sends and receives the same amount, so the load on each link follows from the bytes.
JUDGED = ("all_reduce", "all_gather", "reduce_scatter")

# Groups take the same time to start a collective, so their times compare once the bytes take longer than the start.
# Comparing with a peak of hundreds of GB/s takes 16 MiB.
LARGE_BYTES = CLASSES[2]

LARGE_FOR_PEAK = CLASSES[3]

# Two GPUs with NVLink between them have at least one of a V100's six links. Less than an eighth of all links' bandwidth
# is PCIe (16 of 150, 32 of 300, 63 of 450 GB/s, less its overhead), or the host's memory.
SLOW_OF_PEAK = 1 / 8

# nccl-tests reaches 75 to 80 % of NVLink's peak with large messages.
ATTAINABLE = 0.75

# The fewest collectives that show a slow link.
LEAST_COUNT = 3

# A faulty link has half its bandwidth: one port of two, half of a slot's lanes. Other jobs' traffic costs less than
# half of that difference.
SLOWER = 1.5

# Sizes are alike to this factor.
ALIKE_SIZE = 2.0

# Settings that turn a fast path off: within hosts, between them, or both; with which values (none: any); the effect.
_ON = ("1", "2", "true", "TRUE", "y", "yes")

_SETTINGS: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    ("NCCL_P2P_DISABLE", "within", _ON, "it sends what the GPUs of a host exchange through the host's memory"),
    ("NCCL_P2P_LEVEL", "within", ("LOC", "0"), "it sends what the GPUs of a host exchange through the host's memory"),
    ("NCCL_SHM_DISABLE", "within", _ON, "what cannot go from GPU to GPU then goes through the network card"),
    ("NCCL_IB_DISABLE", "between", _ON, "hosts then exchange through sockets, not InfiniBand or RoCE"),
    ("NCCL_NET", "between", ("Socket", "socket"), "hosts then exchange through sockets, not InfiniBand or RoCE"),
    ("NCCL_SOCKET_IFNAME", "between", (), "sockets then use that interface: is it the fast one?"),
    ("GLOO_SOCKET_IFNAME", "between", (), "gloo then uses that interface: is it the fast one?"),
    ("NCCL_PROTO", "both", ("LL",), "of each eight bytes on the link four are flags"),
    ("NCCL_MAX_NCHANNELS", "both", (), "few channels do not fill a link"),
    ("NCCL_MAX_CTAS", "both", (), "few channels do not fill a link"),
)


@across_ranks
def links(
    matched: Maybe[Frame] = maybe(matched), bandwidth: Maybe[Frame] = maybe(bandwidth), job: Job = needs(JOB)
) -> pd.DataFrame:
    """Return the rows of `bandwidth` with collectives large enough to judge the link, the most exposed first.

    Further columns: each and took_ns (median bytes and median transfer of one; busbw follows from them), on (the ranks,
    in order), of_peak (share of the link's peak), alike_ns (the time of one in similar groups) and better_ns (the time
    of one on a fast link, for slow ones). NaN: unknown, or not slow. Raises NotMeasured where there are none, where
    transfer cannot be separated from waiting, or with nothing to compare with.
    """
    if settings.through_host(job):
        raise NotMeasured(
            "gloo sends what is on a GPU through the host, and the trace times no such link; NCCL would not"
        )
    pairs, frame = matched.get(), bandwidth.get()
    if (frame["size"] < 0).all():
        raise NotMeasured(NO_SIZES)
    key = ["collective", "members", "ranks", "size"]
    each = pairs.assign(dur_ns=pairs["end_ns"] - pairs["start_ns"], ranks=pairs["wanted"]).groupby("instance")
    one = each.agg({"collective": "first", "members": "first", "ranks": "first", "bytes": "max", "dur_ns": "min"})
    one = one.assign(size=size_classes(one["bytes"]))
    frame = frame.merge(one.groupby(key, as_index=False).agg(each=("bytes", "median"), took_ns=("dur_ns", "median")))
    often = frame["collective"].isin(JUDGED) & (frame["matched"] >= LEAST_COUNT)
    frame = frame[often & (frame["each"] >= LARGE_BYTES) & (frame["took_ns"] > 0)].reset_index(drop=True)
    if not len(frame):
        raise NotMeasured(
            f"no collective of {size(LARGE_BYTES)} or more was traced {LEAST_COUNT} times: smaller ones do not show it"
        )
    factor = [bus_factor(kind, n) for kind, n in zip(frame["collective"], frame["ranks"], strict=True)]
    on = [tuple(map(int, m.split(","))) if m else tuple(range(job.world_size)) for m in frame["members"]]
    busbw = frame["each"] * factor / frame["took_ns"] * 1e9
    of_peak = busbw / frame["peak"].where(frame["each"] >= LARGE_FOR_PEAK)
    alike = _alike(frame.assign(placed=[_placed(job, ranks) for ranks in on]))
    frame = frame.assign(busbw=busbw, on=pd.Series(on), of_peak=of_peak, alike_ns=alike)
    frame = frame[frame[["of_peak", "alike_ns"]].notna().any(axis=1)]
    if not len(frame):
        raise NotMeasured("what this link can carry is not known, and there is no similar group to compare with")
    at_peak = (frame["of_peak"] / ATTAINABLE * frame["took_ns"]).where(frame["of_peak"] < SLOW_OF_PEAK)
    as_others = frame["alike_ns"].where(frame["took_ns"] > SLOWER * frame["alike_ns"])
    frame = frame.assign(better_ns=np.fmin(at_peak, as_others))
    return frame.sort_values("exposed_ns", ascending=False, ignore_index=True)


def _placed(job: Job, ranks: Sequence[int]) -> str:
    """Describe how a group's ranks lie among all ranks and hosts; "" where a host is unknown."""
    hosts = [settings.host(job, r) for r in ranks]
    order = {h: n for n, h in enumerate(dict.fromkeys(hosts))}
    return f"{[r - ranks[0] for r in ranks]} on {[order[h] for h in hosts]}" if all(hosts) else ""


def _alike(frame: pd.DataFrame) -> pd.Series[float]:
    """Return for each row the median time of the similar groups for as many bytes, ns; NaN: no similar group.

    The time of a group that exchanges more bytes is not scaled down, as starting takes the same time.
    """
    each, took, members = (frame[name].to_numpy() for name in ("each", "took_ns", "members"))
    alike = np.full(len(frame), np.nan)
    for at in frame[frame["placed"] != ""].groupby(["collective", "placed"]).groups.values():
        for i in at:
            ratio = each[i] / each[at]
            others = (members[at] != members[i]) & (ratio >= 1 / ALIKE_SIZE) & (ratio <= ALIKE_SIZE)
            if others.any():
                alike[i] = np.median((took[at] * np.maximum(ratio, 1.0))[others])
    return pd.Series(alike)


def slowing_settings(job: Job, ranks: Sequence[int], across_hosts: bool) -> Iterator[Change]:
    """Return the removal of each setting that turns a fast path between some ranks off."""
    for name, where, values, does in _SETTINGS:
        is_set = {r: str((job.facts[r].get("env") or {}).get(name) or "") for r in job.ranks}
        value = next((is_set[r] for r in ranks if is_set[r] and (not values or is_set[r] in values)), "")
        if value and where in ("both", "between" if across_hosts else "within"):
            others = [r for r in job.ranks if r not in ranks]
            alone = ", only on these ranks" if others and all(is_set[r] != value for r in others) else ""
            yield Change(f"unset `{name}` (is {value}{alone}): {does}", (Setting(name, value),))
