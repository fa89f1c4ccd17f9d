"""The scale of a gradient scaler over the job, and the steps that it skipped."""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof.analysis.engine import Frame, Maybe, maybe, needs
from dlprof.analysis.panel import Picture, points
from dlprof.analysis.step.scalers import ON_DEVICE, scale_changes, scalers
from dlprof.result import Panel


def draw(scale_changes: Frame = needs(scale_changes), scalers: Maybe[Frame] = maybe(scalers)) -> list[Panel]:
    """Draw the scale of each scaler over the steps; all ranks have the same, so one is drawn."""
    rank = scale_changes["rank"].min()
    mine = scale_changes[scale_changes["rank"] == rank]
    lines = np.log2(mine.groupby(["step", "scaler"])["scale"].last().unstack().ffill())
    known = scalers.get()
    known = known[known["rank"] == rank]
    note = " ".join(
        f"Scaler {row['scaler']} skipped {row['skipped']:,} steps, {row['at_first']:,} of them before its scale first"
        f" fitted; its scale is {row['scale']:,.6g}."
        if row["known"]
        else f"For scaler {row['scaler']} only the beginning is known: {ON_DEVICE}."
        for row in known.to_dict("records")
    )
    names = tuple(f"scaler {number}" if len(lines.columns) > 1 else "scale" for number in lines.columns)
    note = f"Logarithm to base 2, on rank {rank}. {note}"
    return [Panel("lines", "Loss scale", points(pd.DataFrame(lines)), ("step", *names), note=note)]


PICTURE = Picture(draw)
