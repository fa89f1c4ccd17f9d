"""What PyTorch's allocator holds."""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof.analysis.panel import MOST_RANKS, Picture, points
from dlprof.result import Panel


def draw(memory_series: pd.DataFrame, step_times: pd.Series[float]) -> list[Panel]:
    """Draw the memory allocated and reserved over the run, in bytes."""
    kinds = {
        kind: memory_series.pivot_table(index="step", columns="rank", values=f"{kind}_bytes")
        for kind in ("reserved", "allocated")
    }
    if memory_series["rank"].nunique() > MOST_RANKS:
        table = pd.DataFrame({f"most {kind} of a rank": frame.max(axis=1) for kind, frame in kinds.items()})
    else:
        named = [frame.set_axis([f"rank {r} {kind}" for r in frame.columns], axis=1) for kind, frame in kinds.items()]
        table = pd.concat(named, axis=1)
    times = np.interp(table.index.to_numpy(), step_times.index.to_numpy(), step_times.to_numpy())
    table = table.set_axis(pd.Index(np.atleast_1d(times)), axis=0)
    note = "By tensors at the end of a step, and taken from the device by PyTorch's allocator."
    return [
        Panel(
            "lines",
            "GPU memory of PyTorch",
            points(table),
            ("time_ns", *map(str, table.columns)),
            unit="bytes",
            note=note,
        )
    ]


PICTURE = Picture(draw)
