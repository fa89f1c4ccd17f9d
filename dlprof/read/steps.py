"""Reads steps.jsonl, the step log: a line a step, or one for several short ones in a row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.read import limits, logs
from dlprof.read.sources import Reading


def read(path: Path) -> Reading:
    """Return the table "steps"; raises DlprofError if the file cannot be read or is no log of steps."""
    extra = {"steps": "int64", "outstanding": "int64"}
    log = logs.rows(path, "steps", ("step", "start_ns", "dur_ns"), {"kind": "other"}, extra)
    frame, warnings = _settled(log.tables["steps"]), log.warnings
    steps = np.maximum(frame["steps"].to_numpy(), 1)
    most = limits.limit(limits.MOST_ROWS)
    fit = int(np.searchsorted(np.cumsum(steps.astype(float)), most, side="right"))
    if fit < len(frame):
        warnings += (limits.too_many(path, "steps", most),)
    frame = _each(frame.drop(columns=list(extra)).head(fit), steps[:fit])
    if not len(frame):
        warnings += (f"{path.name}: holds no steps",)
    return Reading({"steps": frame}, {}, warnings)


def _settled(frame: pd.DataFrame) -> pd.DataFrame:
    """Leave out the lines that were written before a step's device time was known, where it was written again."""
    outstanding = frame["outstanding"].to_numpy() > 0
    if not outstanding.any():
        return frame
    end = (frame["start_ns"] + frame["dur_ns"]).to_numpy()
    last = end[~outstanding].max(initial=0)
    left = np.flatnonzero(~outstanding | (frame["start_ns"].to_numpy() >= last))
    return frame.take(left).reset_index(drop=True)


# A line of several steps holds the sum of these; in the rest its steps are alike.
_PARTS = ("lead_ns", "fetch_ns", "forward_ns", "backward_ns", "optimizer_ns", "device_step_ns", "unused_forward_ns")
_COUNTS = ("fetches", "forwards", "backwards", "optimizer_steps", "samples", "inputs", "tokens")
_SUMS = ("dur_ns", *_PARTS, *_COUNTS)


def _each(frame: pd.DataFrame, steps: NDArray[np.int64]) -> pd.DataFrame:
    """Return every step a row: those of one line follow each other and share its times, to the nanosecond."""
    if not len(frame) or steps.max() == 1:
        return frame
    each = frame.loc[np.repeat(np.arange(len(frame)), steps)].reset_index(drop=True)
    n = np.repeat(steps, steps)
    nth = np.arange(len(each)) - np.repeat(np.cumsum(steps) - steps, steps)

    def share(name: str) -> NDArray[np.int64]:
        total = each[name].to_numpy()
        return np.where(total < 0, total, total * (nth + 1) // n - total * nth // n)

    return each.assign(
        step=each["step"] + nth,
        start_ns=each["start_ns"] + each["dur_ns"] * nth // n,
        **{name: share(name) for name in _SUMS},
    )
