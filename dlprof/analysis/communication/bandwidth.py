"""How fast collectives move their bytes: by kind, group and size, beside what the link can carry where that is known.

Of a collective's time, what the last to arrive spends in it is transfer: the least over its ranks. Bytes over that is
the algorithm's bandwidth; what it asks of every rank's link is the bus bandwidth, with nccl-tests' factors, which can
be held against the link's own peak whatever the collective and however many ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import settings
from dlprof.analysis.communication.collectives import NOBODY
from dlprof.analysis.communication.matching import SENT
from dlprof.analysis.communication.waits import exposed_between
from dlprof.analysis.compute.peaks import nvlink
from dlprof.analysis.engine import Job, Maybe, across_ranks
from dlprof.analysis.step.breakdown import part
from dlprof.errors import NotMeasured

# Bounds of the classes of size, bytes: from one to the next, a transfer takes up to 16 times as long.
CLASSES = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 28)


def bus_factor(collective: str, ranks: int) -> float:
    """Return bus bandwidth over algorithm bandwidth, as nccl-tests defines it; an all-gather counts its output."""
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if collective in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0


@across_ranks
def bandwidth(transfers: pd.DataFrame, window_steps: pd.DataFrame, job: Job) -> pd.DataFrame:
    """Sum up the collectives by kind, members and class of size, for the mean traced step.

    Columns: collective, members, ranks (how many) and size (index into CLASSES; 0 and −1: not told), count (a step),
    bytes (of all), transfer_ns (of all; at most, where ranks are missing), wait_ns (mean over its ranks), exposed_ns
    (of transfer and rank, in the mean steady step), algbw, busbw (bytes/s), peak (of the link, bytes/s), culprit, late
    (how many collectives it came last to) and matched (of how many). NaN and culprit −1: not known.
    """
    steps = max(int(window_steps.groupby("rank").size().max()), 1)
    rows = [
        _row(job, {"collective": kind, "members": members, "ranks": n, "size": size}, mine, steps)
        for (kind, members, n, size), mine in transfers.groupby(["collective", "members", "ranks", "size"])
    ]
    return pd.DataFrame(rows).sort_values("transfer_ns", ascending=False, ignore_index=True)


@across_ranks
def exchanged(bandwidth: pd.DataFrame) -> pd.DataFrame:
    """Sum up `bandwidth` over groups of as many ranks: what a rank has of each kind and class of size, longest first.

    Columns: collective, ranks, size, groups (how many), count, bytes, wait_ns and transfer_ns (of a step, mean of the
    groups), algbw and busbw (bytes/s, of all their transfers), of_peak (busbw over the link's), and of the group that
    waits for one rank most often culprit, late and matched. NaN and culprit −1: not known.
    """
    frame = bandwidth
    frame = frame.assign(carried=frame["busbw"] * frame["transfer_ns"], free=frame["algbw"] * frame["transfer_ns"])
    rows = []
    for (kind, ranks, of_size), mine in frame.groupby(["collective", "ranks", "size"]):
        groups, transfer = len(mine), float(mine["transfer_ns"].sum()) or np.nan
        busbw = float(mine["carried"].sum(skipna=False)) / transfer
        worst = mine.nlargest(1, "late").iloc[0]
        rows.append(
            {
                "collective": str(kind),
                "ranks": int(str(ranks)),
                "size": int(str(of_size)),
                "groups": groups,
                "count": float(mine["count"].sum()) / groups,
                "bytes": float(mine["bytes"].mean()),
                "wait_ns": float(mine["wait_ns"].mean()),
                "transfer_ns": float(mine["transfer_ns"].sum()) / groups,
                "algbw": float(mine["free"].sum(skipna=False)) / transfer,
                "busbw": busbw,
                "of_peak": busbw / float(mine["peak"].min(skipna=False)),
                "culprit": int(worst["culprit"]),
                "late": int(worst["late"]),
                "matched": int(worst["matched"]),
            }
        )
    whole = pd.DataFrame(rows)
    longest = (-(whole["transfer_ns"] + whole["wait_ns"].fillna(0.0))).argsort(kind="stable")
    return whole.iloc[longest].reset_index(drop=True)


@across_ranks
def transfers(
    matched: Maybe[pd.DataFrame],
    instances: Maybe[pd.DataFrame],
    exposed: pd.DataFrame,
    window_steps: pd.DataFrame,
    breakdown: pd.DataFrame,
    job: Job,
) -> pd.DataFrame:
    """Return each collective of the traced steps once, whatever rank had it.

    Columns: collective, members, ranks (how many), size (index into CLASSES, −1: not told), bytes, dtype, transfer_ns
    (where ranks are missing, at most), wait_ns (mean over its ranks, NaN: not known), bare_ns (exposed transfer, mean
    over its ranks, brought to the steady steps), late (the last to come, −1: not known).
    """
    try:
        frame, known = matched.get(), True
    except NotMeasured:
        frame, known = instances.get(), False
        frame = frame.assign(wait_ns=0, last=False)
    begin = (frame["start_ns"] + frame["wait_ns"]).to_numpy()
    frame = frame.assign(
        size=size_classes(frame["bytes"]),
        bare_ns=exposed_between(exposed, job, frame["rank"].to_numpy(), begin, frame["end_ns"].to_numpy())
        * _scale(exposed, window_steps, breakdown, frame),
        dur_ns=_transfer(frame),
        late=frame["rank"].where(frame["last"], -1),
    )
    first = frame.drop_duplicates("instance").set_index("instance").sort_index()
    one = first[["collective", "members", "wanted", "size", "dtype"]].rename(columns={"wanted": "ranks"})
    each = frame.groupby("instance")
    one[["bytes", "late"]] = each[["bytes", "late"]].max()
    one["transfer_ns"] = each["dur_ns"].min()
    one[["wait_ns", "bare_ns"]] = each[["wait_ns", "bare_ns"]].mean()
    return one if known else one.assign(wait_ns=np.nan)


def _transfer(frame: pd.DataFrame) -> pd.Series[float]:
    """Return what each row's rank knows of the transfer, ns; of the same collective the least is it.

    A sender may be rid of its bytes long before they have arrived: the receiver knows, once it need not wait.
    """
    dur = (frame["end_ns"] - frame["start_ns"]).astype(float)
    sent = frame["collective"] == SENT
    return dur.mask(sent, (dur - frame["wait_ns"]).mask(frame["is_sender"]))


def _row(job: Job, key: dict[str, Any], mine: pd.DataFrame, steps: int) -> dict[str, Any]:
    total, transfer = float(mine["bytes"].sum()), float(mine["transfer_ns"].sum())
    told = key["size"] >= 0 and transfer > 0
    algbw = total / transfer * 1e9 if told else np.nan
    late = mine["late"][mine["late"] >= 0].value_counts()
    return key | {
        "count": len(mine) / steps,
        "bytes": total / steps if told else np.nan,
        "transfer_ns": transfer / steps,
        "wait_ns": float(mine["wait_ns"].sum(skipna=False)) / steps,
        "exposed_ns": float(mine["bare_ns"].sum()) / steps,
        "algbw": algbw,
        "busbw": algbw * bus_factor(str(key["collective"]), int(key["ranks"])) if key["ranks"] else np.nan,
        "peak": _peak(job, str(key["members"])),
        "culprit": int(str(late.index[0])) if len(late) else -1,
        "late": int(late.iloc[0]) if len(late) else 0,
        "matched": len(mine),
    }


def _scale(
    exposed: pd.DataFrame, window_steps: pd.DataFrame, breakdown: pd.DataFrame, frame: pd.DataFrame
) -> pd.Series[float]:
    """Return for each row what brings its rank's exposed communication from the traced steps to the mean steady one."""
    traced = (exposed["end_ns"] - exposed["start_ns"]).groupby(exposed["rank"]).sum() / window_steps.groupby(
        "rank"
    ).size()
    steady = pd.Series(part(breakdown, "communication"), dtype=float)
    return frame["rank"].map((steady / traced).replace([np.inf, -np.inf], np.nan)).fillna(0.0)


def _peak(job: Job, members: str) -> float:
    """Return what the link between some ranks carries in one direction, bytes/s: known of NVLink within one host."""
    if members == NOBODY:
        return float("nan")
    ranks = [int(r) for r in members.split(",")] if members else range(job.world_size)
    hosts, names = set(), set()
    for rank in ranks:
        if rank not in job.facts:
            return float("nan")
        facts, trace = job.facts[rank], job.trace_facts[rank]
        hosts.add(settings.host(job, rank))
        devices = trace.get("devices") or [{}]
        names.add(str((facts.get("device") or {}).get("name") or devices[0].get("name") or ""))
    if len(hosts) != 1 or "" in hosts or len(names) != 1:
        return float("nan")
    return nvlink(names.pop()) or float("nan")


def size_classes(size: pd.Series[int]) -> NDArray[np.int64]:
    """Return the index into CLASSES of each size, bytes; −1: not told."""
    classes: NDArray[np.int64] = np.where(size < 0, -1, np.searchsorted(CLASSES, size, side="right"))
    return classes


def size_class(index: int) -> str:
    """Write a class of size."""
    if index < 0:
        return "not told"
    words = [f"{bound >> 10} KiB" if bound < 1 << 20 else f"{bound >> 20} MiB" for bound in CLASSES]
    return f"below {words[index]}" if index < len(words) else f"{words[-1]} or more"
