"""What the job's time went into beside its steady steps."""

from __future__ import annotations

import pandas as pd

from dlprof.analysis.panel import Picture
from dlprof.analysis.step.whole_job import PARTS
from dlprof.errors import NotMeasured
from dlprof.result import Panel

_PARTS = {
    "setup": "setting up, from importing torch to the first step",
    "warmup": "training, warming up",
    "steady": "training, steady",
    "traced": "slowed by tracing and counting",
    "epoch_ends": "an epoch's first batch or end",
    "validation": "validation",
    "other": "no training and no validation",
    "suspended": "steps about the time in which the job was stopped",
    "checkpoint": "of it saving checkpoints",
    "compilation": "of it compiling",
    "garbage_collection": "of it collecting garbage",
}


def draw(whole_job: pd.DataFrame) -> list[Panel]:
    """Return what the job's time went into beside its steady steps, as the mean over the ranks."""
    ranks = whole_job["rank"].nunique()
    sums = whole_job.groupby("part")[["steps", "ns"]].sum() / ranks
    total = float(sums["ns"][sums.index.isin(PARTS)].sum())
    rows = tuple(
        (label, float(sums["steps"][part]) if part != "setup" else "", ns, ns / total)
        for part, label in _PARTS.items()
        if part in sums.index and (ns := float(sums["ns"][part])) > 0
    )
    if len(rows) < 2:
        raise NotMeasured("all of the job were steady steps")
    note = "Findings and their savings speak of the steady steps, but for those outside of them."
    if ranks > 1:
        note = f"Means over {ranks} ranks. {note}"
    return [Panel("table", "The whole job", rows, ("", "how many", "time_ns", "share"), note=note)]


PICTURE = Picture(draw)
