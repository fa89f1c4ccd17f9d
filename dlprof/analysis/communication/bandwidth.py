"""How fast collectives move their bytes, by kind, group and size, next to the link's peak where that is known.

The transfer is the time that the last rank to arrive spends in a collective: the least over its ranks. Bytes over that
are the algorithm bandwidth; what it demands of every rank's link is the bus bandwidth (nccl-tests' factors), which
compares with the link's peak whatever the collective and however many ranks.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import settings
from dlprof.analysis.communication.collectives import NOBODY, exposed, window_steps
from dlprof.analysis.communication.matching import SENT, instances, matched
from dlprof.analysis.communication.waits import exposed_between
from dlprof.analysis.compute.peaks import nvlink
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, across_ranks, maybe, needs
from dlprof.analysis.step.breakdown import breakdown, part
from dlprof.errors import NotMeasured

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
    # From the traced steps to the mean steady one.
    traced = (exposed["end_ns"] - exposed["start_ns"]).groupby(exposed["rank"]).sum()
    traced = traced / window_steps.groupby("rank").size()
    scale = (pd.Series(part(breakdown, "communication"), dtype=float) / traced).replace([np.inf, -np.inf], np.nan)
    dur = (frame["end_ns"] - frame["start_ns"]).astype(float)
    # A sender may be rid of its bytes long before they arrive: the receiver knows, once it need not wait.
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
    # What is not known of one group is not known of their sum.
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
    """Return what the link between some ranks carries in one direction, bytes/s: known of NVLink within one host."""
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
