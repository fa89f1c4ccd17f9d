"""What makes the host wait for its device."""

from __future__ import annotations

from typing import Any

from dlprof.engine import Measured, by_rank
from dlprof.errors import NotMeasured
from dlprof.measures.syncs import syncs
from dlprof.overview import Picture
from dlprof.result import Panel


def draw(run: Measured) -> list[Panel]:
    """List what makes the host wait for its device, on the rank that waits longest."""
    frame = run.frame(syncs)
    if not len(frame):
        raise NotMeasured("the training thread waits for no device")
    ns, calls = by_rank(frame, "ns"), by_rank(frame, "calls")
    rank = max(ns, key=lambda r: (ns[r], calls[r], r))
    mine = frame[frame["rank"] == rank]
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


PICTURE = Picture((syncs,), draw)
