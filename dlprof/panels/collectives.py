"""The collectives of a step: how often, how large, how long they wait and transfer, and how fast."""

from __future__ import annotations

import math

import numpy as np

from dlprof.engine import Measured
from dlprof.measures.bandwidth import bandwidth, size_class
from dlprof.measures.collectives import SENT, collectives, matched, unmatched
from dlprof.overview import Picture
from dlprof.result import Panel
from dlprof.units import UNKNOWN, digits, duration, percent, size

MOST_ROWS = 12


def draw(run: Measured) -> list[Panel]:
    """List the collectives by kind, ranks and size, the longest first; groups of as many ranks are one row."""
    frame = run.frame(bandwidth)
    waits = bool(frame["wait_ns"].notna().all())
    frame = frame.assign(carried=frame["busbw"] * frame["transfer_ns"], free=frame["algbw"] * frame["transfer_ns"])
    rows = []
    for (kind, ranks, of_size), mine in frame.groupby(["collective", "ranks", "size"]):
        groups = len(mine)
        transfer = float(mine["transfer_ns"].sum())
        worst = mine.nlargest(1, "late").iloc[0]
        busbw = float(mine["carried"].sum(skipna=False)) / transfer if transfer else math.nan
        cells = (
            _named(str(kind), groups),
            str(ranks),
            size_class(int(str(of_size))),
            digits(round(float(mine["count"].sum()) / groups, 1)),
            size(float(mine["bytes"].mean())),
            duration(float(mine["wait_ns"].mean())),
            duration(transfer / groups),
            _rate(float(mine["free"].sum(skipna=False)) / transfer if transfer else math.nan),
            _rate(busbw),
            percent(busbw / float(mine["peak"].min(skipna=False))),
            f"rank {worst['culprit']}, {worst['late']} of {worst['matched']}" if worst["culprit"] >= 0 else UNKNOWN,
        )
        rows.append((transfer / groups + float(np.nan_to_num(mine["wait_ns"].mean())), cells))
    rows.sort(key=lambda row: -row[0])
    shown = tuple(cells for _, cells in rows[:MOST_ROWS])
    columns = (
        "collective",
        "ranks",
        "size of one",
        "a step",
        "bytes a step",
        "waiting",
        "transfer",
        "algorithm bandwidth",
        "bus bandwidth",
        "of the link's peak",
        "last to come",
    )
    note = (
        "Of a step and a rank, hidden time included. Transfer is the least time over the ranks (of what is sent, the"
        " receiver's from when both had come); bytes over it is the"
        " algorithm's bandwidth, and the bus bandwidth is what that asks of each link (nccl-tests' factors)."
    )
    if not waits:
        note += (
            " Not every rank's trace is here or matches: waiting is not told apart, and transfer takes at most so long."
        )
    if why := unmatched(run):
        note += f" Not in it: {why}."
    if frame["peak"].isna().all():
        note += " What the link could carry is not known."
    if len(rows) > MOST_ROWS:
        note += f" The longest {MOST_ROWS} of {len(rows)}."
    return [Panel("table", "Collectives", shown, columns, note=note)]


def _named(kind: str, groups: int) -> str:
    if kind == SENT:
        return "send and receive" + (f" in {groups} directions" if groups > 1 else "")
    return (kind or "not told") + (f" in {groups} groups" if groups > 1 else "")


def _rate(value: float) -> str:
    return f"{size(value)}/s" if math.isfinite(value) else UNKNOWN


PICTURE = Picture((bandwidth, collectives, matched), draw)
