"""Copies between host and device run while nothing else does, though their memory would let them overlap.

Computation can hide a copy from pinned memory: on a stream of its own, one batch ahead. Where it is issued on the
computing stream, or waited for at once, the device only copies.

Needs a trace of a GPU run that links launches to kernels. Copies from pageable memory to the device are left out: see
`pageable_copy`.

Saving: that of the way on which most is exposed, for that is what the change is for. The traced steps replayed with
these copies on a stream of their own, as far as there is computation to hide them; on the way back and within the
device, without them.

What to change: `non_blocking=True`, and prefetch the next batch on a side stream while this one computes; on the way
back (`.cpu()`, `.item()`, `.tolist()`), copy rarely and into pinned memory. Copies within the device are kernels' work
in disguise: `contiguous()` and dtype changes that a better layout avoids.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.compute.panels.kernels import copy_table
from dlprof.analysis.engine import Job, Maybe, by_rank
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.memory.copies import from_pageable, hideable
from dlprof.analysis.step.breakdown import part_least, part_noise
from dlprof.errors import DoesNotApply
from dlprof.units import count, duration

_WAY = {"HtoD": "to the device", "DtoH": "from the device", "DtoD": "within the device", "PtoP": "between devices"}

_CHANGES = {
    "HtoD": "`non_blocking=True`, and copy the next batch on a side stream while this one computes",
    "DtoH": "copy results back every k steps, not every step; into pinned memory with `non_blocking=True`",
}


def check(
    copies: Maybe[pd.DataFrame],
    copy_gains: Maybe[pd.DataFrame],
    breakdown: Maybe[pd.DataFrame],
    job: Job,
) -> Estimate:
    """Estimate what hiding or leaving out the exposed copies would gain, but for those from pageable memory."""
    if settings.on_cpu(job):
        raise DoesNotApply("the job trains on the CPU, where nothing is copied to a device")
    seen = copies.get()
    able = seen[~from_pageable(seen)]
    if not len(able):
        return nothing("no copies of more than a few bytes but those from pageable memory")
    way = str(able.groupby("copy")["exposed_ns"].sum().idxmax())
    gains = copy_gains.get()
    gone = by_rank(gains[(gains["copy"] == way) & ~from_pageable(gains)], "gain_ns")
    if way == "HtoD":
        gone = hideable(breakdown.get(), seen, gone)
    return Estimate(
        gone_ns=gone,
        noise_ns=part_noise(breakdown.get(), "copy"),
        least_ns=part_least(breakdown.get(), "copy"),
        loses=f"is spent copying data {_WAY.get(way, way)} while nothing computes",
        seen=(way, able[able["copy"] == way]),
    )


def explain(estimate: Estimate, copies: pd.DataFrame) -> Explanation:
    """Show how many the copies on the most exposed way are, and how long, on the rank that they cost most."""
    way, copied = estimate.seen
    number, ns, exposed = copied.loc[copied["rank"] == estimate.worst, ["count", "copy_ns", "exposed_ns"]].sum()
    settings: Any = {"non_blocking": (None, True)} if way in _CHANGES else {}
    where, text = _WAY.get(way, way), _CHANGES.get(way, "avoid the copy: a layout or dtype that both sides share")
    return Explanation(
        title=f"Copies {where} are not hidden",
        summary=f"{count(number, 'copy')} a step {where} {'takes' if number == 1 else 'take'} {duration(ns)}; for"
        f" {duration(exposed)} of it the device does nothing else.",
        changes=(change(text, **settings),),
        evidence=copy_table(copies, estimate.worst),
        sure="Estimated by replaying the traced steps without these copies on the stream that computes.",
    )


RULE = Rule(
    "exposed_copy",
    "Copies that nothing hides",
    check,
    explain,
    saves_from=("copy", "input_wait", "host", "launch_latency"),
    notable=0.03,  # as for copies from pageable memory
)
