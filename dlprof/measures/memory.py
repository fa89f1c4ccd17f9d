"""How much of the device's memory PyTorch's allocator took, and how often it had to ask the device again."""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof.engine import RankData, per_rank
from dlprof.errors import NotMeasured

# What travels of the series: enough for any screen.
MOST_ROWS = 500


@per_rank
def memory_use(rank: RankData) -> pd.DataFrame:
    """Give one row: peak_allocated_bytes, peak_reserved_bytes, total_bytes (NaN: not known), retries, ooms and late.

    `late` counts the allocations from the device in the second half of the readings, when the allocator's cache should
    serve all. Peaks are since the script last reset them, at any reading. −1: not told.
    """
    frame = _readings(rank)
    device = rank.facts.get("device") or {}
    total = device.get("memory_bytes") if device.get("type") == "cuda" else None
    asked = frame["device_allocs"].to_numpy()
    halfway = asked[len(asked) // 2]
    return pd.DataFrame(
        {
            "peak_allocated_bytes": [int(frame[["peak_allocated_bytes", "allocated_bytes"]].to_numpy().max())],
            "peak_reserved_bytes": [int(frame[["peak_reserved_bytes", "reserved_bytes"]].to_numpy().max())],
            "total_bytes": [np.nan if total is None else float(total)],
            "retries": [int(frame["retries"].max())],
            "ooms": [int(frame["ooms"].max())],
            "late": [int(asked[-1] - halfway) if halfway >= 0 else -1],
        }
    )


@per_rank
def memory_series(rank: RankData) -> pd.DataFrame:
    """Give the readings in order, thinned: step, allocated_bytes, reserved_bytes."""
    frame = _readings(rank)
    stride = -(-len(frame) // MOST_ROWS)
    thinned: pd.DataFrame = frame[["step", "allocated_bytes", "reserved_bytes"]].iloc[::stride]
    return thinned


def _readings(rank: RankData) -> pd.DataFrame:
    frame = rank.table("memory")
    if not len(frame):
        raise NotMeasured("the allocator was never asked")
    return frame
