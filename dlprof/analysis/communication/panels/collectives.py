"""The collectives of a step: how often, how large, how long they wait and transfer, and how fast."""

from __future__ import annotations

import pandas as pd

from dlprof.analysis.communication.bandwidth import size_class
from dlprof.analysis.communication.matching import SENT
from dlprof.analysis.panel import Picture, cells
from dlprof.result import Panel

MOST_ROWS = 40


def draw(exchanged: pd.DataFrame, unmatched: str, bandwidth: pd.DataFrame) -> list[Panel]:
    """List the collectives by kind, ranks and size, the longest first; groups of as many ranks are one row."""
    frame = exchanged
    rows = tuple(
        (
            _named(row["collective"], row["groups"]),
            row["ranks"] or None,
            size_class(row["size"]),
            *(row[c] for c in ("count", "bytes", "wait_ns", "transfer_ns", "algbw", "busbw", "of_peak")),
            *((row[c] if row["culprit"] >= 0 else None) for c in ("culprit", "late", "matched")),
        )
        for row in cells(frame.head(MOST_ROWS)).to_dict("records")
    )
    columns = (
        "collective",
        "ranks",
        "size of one",
        "a step",
        "data a step_bytes",
        "waiting_ns",
        "transfer_ns",
        "algorithm bandwidth per second_bytes",
        "bus bandwidth per second_bytes",
        "link's peak_share",
        "last rank",
        "last in",
        "of",
    )
    note = (
        "Of a step and a rank, hidden time included. Transfer is the least time over the ranks (of what is sent, the"
        " receiver's from when both had come); bytes over it is the"
        " algorithm's bandwidth, and the bus bandwidth is what that asks of each link (nccl-tests' factors)."
    )
    if frame["wait_ns"].isna().any():
        note += (
            " Not every rank's trace is here or matches: waiting is not told apart, and transfer takes at most so long."
        )
    if why := unmatched:
        note += f" Not in it: {why}."
    if frame["of_peak"].isna().all() and bandwidth["peak"].isna().all():
        note += " What the link could carry is not known."
    if len(frame) > MOST_ROWS:
        note += f" The longest {MOST_ROWS} of {len(frame)}."
    return [Panel("table", "Collectives", rows, columns, note=note)]


def _named(kind: str, groups: int) -> str:
    if kind == SENT:
        return "send and receive" + (f" in {groups} directions" if groups > 1 else "")
    return (kind or "not told") + (f" in {groups} groups" if groups > 1 else "")


PICTURE = Picture(draw)
