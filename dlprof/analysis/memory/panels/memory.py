"""Memory that PyTorch's allocator has allocated and reserved."""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof.analysis.engine import Frame, needs
from dlprof.analysis.memory.memory import memory_series
from dlprof.analysis.panel import MOST_RANKS, Picture, points
from dlprof.analysis.step.run_clock import step_times
from dlprof.result import Panel


def draw(memory_series: Frame = needs(memory_series), step_times: pd.Series[float] = needs(step_times)) -> list[Panel]:
    """Draw the memory allocated and reserved over the run, in bytes."""
    lines: dict[str, pd.Series[float]] = {}
    for kind in ("reserved", "allocated"):
        by_rank = memory_series.pivot_table(index="step", columns="rank", values=f"{kind}_bytes")
        if len(by_rank.columns) > MOST_RANKS:
            lines[f"most {kind} of a rank"] = by_rank.max(axis=1)
        else:
            lines |= {f"rank {rank} {kind}": by_rank[rank] for rank in by_rank}
    table = pd.DataFrame(lines)
    times = np.interp(table.index.to_numpy(), step_times.index.to_numpy(), step_times.to_numpy())
    note = "Allocated: held by tensors at the end of a step. Reserved: taken from the device by PyTorch's allocator."
    rows = points(table.set_axis(pd.Index(np.atleast_1d(times)), axis=0))
    return [Panel("lines", "GPU memory of PyTorch", rows, ("time_ns", *lines), unit="bytes", note=note)]


PICTURE = Picture(draw)
