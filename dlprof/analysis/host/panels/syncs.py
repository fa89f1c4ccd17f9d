"""What makes the host wait for its device."""

from __future__ import annotations

import pandas as pd

from dlprof.analysis.engine import Frame, by_rank, needs
from dlprof.analysis.host.syncs import syncs
from dlprof.analysis.panel import Picture, table
from dlprof.errors import NotMeasured
from dlprof.result import Panel

COLUMNS = {
    "asked": "by",
    "call": "waits in",
    "calls": "times a step",
    "ns": "waiting a step_ns",
    "idle_ns": "device then idle_ns",
}


def draw(syncs: Frame = needs(syncs)) -> list[Panel]:
    """List what makes the host wait for its device, on the rank that waits longest."""
    if not len(syncs):
        raise NotMeasured("the training thread waits for no device")
    ns, calls = by_rank(syncs, "ns"), by_rank(syncs, "calls")
    rank = max(ns, key=lambda r: (ns[r], calls[r], r))
    mine = syncs[syncs["rank"] == rank]
    if mine["ns"].isna().any():
        note = "On a GPU each of these would wait until the device has caught up."
        columns = {name: COLUMNS[name] for name in ("asked", "calls")}
        return [table(f"Values read out of tensors, rank {rank}", mine, columns, note=note)]
    note = "Then idle: the device, which ran dry meanwhile, had nothing to do until the host had launched again."
    return [table(f"Waiting until the device has caught up, rank {rank}", by_python(mine), COLUMNS, note=note)]


def by_python(waits: pd.DataFrame) -> pd.DataFrame:
    """Return rows of `syncs` in which Python asked where no operator did."""
    return waits.assign(asked=waits["asked"].replace("", "Python"))


PICTURE = Picture(draw)
