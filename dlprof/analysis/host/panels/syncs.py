"""What makes the host wait for its device."""

from __future__ import annotations

from typing import Any

import pandas as pd

from dlprof.analysis.engine import by_rank
from dlprof.analysis.panel import Picture
from dlprof.errors import NotMeasured
from dlprof.result import Panel


def draw(syncs: pd.DataFrame) -> list[Panel]:
    """List what makes the host wait for its device, on the rank that waits longest."""
    if not len(syncs):
        raise NotMeasured("the training thread waits for no device")
    ns, calls = by_rank(syncs, "ns"), by_rank(syncs, "calls")
    rank = max(ns, key=lambda r: (ns[r], calls[r], r))
    mine = syncs[syncs["rank"] == rank]
    if mine["ns"].isna().any():
        rows: tuple[tuple[Any, ...], ...] = tuple(
            (str(asked), float(n)) for asked, n in zip(mine["asked"], mine["calls"], strict=True)
        )
        note = "On a GPU each of these would wait until the device has caught up."
        return [Panel("table", f"Values read out of tensors, rank {rank}", rows, ("by", "times a step"), note=note)]
    rows = tuple(
        (str(asked) or "Python", str(call), float(n), float(ns), float(idle))
        for asked, call, n, ns, idle in zip(
            mine["asked"], mine["call"], mine["calls"], mine["ns"], mine["idle_ns"], strict=True
        )
    )
    columns = ("by", "waits in", "times a step", "waiting a step_ns", "device then idle_ns")
    note = "Then idle: the device, which ran dry meanwhile, had nothing to do until the host had launched again."
    return [Panel("table", f"Waiting until the device has caught up, rank {rank}", rows, columns, note=note)]


PICTURE = Picture(draw)
