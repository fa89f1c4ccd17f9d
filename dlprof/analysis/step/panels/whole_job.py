"""What the job's time went into besides its steady steps."""

from __future__ import annotations

from dlprof.analysis.engine import Frame, needs
from dlprof.analysis.panel import Picture, table
from dlprof.analysis.step.whole_job import PARTS, whole_job
from dlprof.errors import NotMeasured
from dlprof.result import Panel

_PARTS = {
    "setup": "setting up, from importing torch to the first step",
    "warmup": "training, warming up",
    "steady": "training, steady",
    "traced": "traced or counted, which takes longer",
    "epoch_ends": "an epoch's first batch or end",
    "validation": "validation",
    "other": "no training and no validation",
    "suspended": "steps during which the job was stopped",
    "checkpoint": "of it saving checkpoints",
    "compilation": "of it compiling",
    "garbage_collection": "of it collecting garbage",
}


def draw(whole_job: Frame = needs(whole_job)) -> list[Panel]:
    """Return what the job's time went into besides its steady steps, as the mean over the ranks."""
    ranks = whole_job["rank"].nunique()
    sums = whole_job.groupby("part")[["steps", "ns"]].sum() / ranks
    sums = sums.assign(share=sums["ns"] / sums["ns"][sums.index.isin(PARTS)].sum())
    shown = sums.reindex(list(_PARTS)).query("ns > 0").rename(_PARTS).reset_index()
    if len(shown) < 2:
        raise NotMeasured("the whole job was steady steps")
    shown["steps"] = shown["steps"].astype(object).where(shown["part"] != _PARTS["setup"], "")
    note = "Findings and their savings are of the steady steps, except those about the time outside them."
    note = f"Means over {ranks} ranks. {note}" if ranks > 1 else note
    headings = {"part": "", "steps": "how many", "ns": "time_ns", "share": "share"}
    return [table("The whole job", shown, headings, note=note)]


PICTURE = Picture(draw)
