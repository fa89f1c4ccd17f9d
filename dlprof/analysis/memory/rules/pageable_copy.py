"""Batches are copied to the device from pageable memory, and nothing hides the copies.

The device can only read memory that the system may not move. A copy from ordinary (pageable) memory is staged through a
small pinned buffer, piece by piece: it is slower, it holds the training thread, and it cannot overlap with computation.

Needs a trace of a GPU run that links launches to kernels; its copies are named `Memcpy HtoD (Pageable -> Device)`.

Saving: the traced steps replayed with copies that take as long as from pinned memory, and no wait for them. Their
rate is that of other copies of this trace, or of the link that a GPU of this name has; else they are as slow as now.
They keep their place on the stream that computes; hiding them as well is what `exposed_copy` is about.

What to change: `pin_memory=True` on the DataLoader, and `.to(device, non_blocking=True)` for the batch. Memory that
does not come from a loader: `tensor.pin_memory()` once, outside the loop.
"""

from __future__ import annotations

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.compute.panels.kernels import copy_table
from dlprof.analysis.engine import Job, Maybe, by_rank
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.memory.copies import from_pageable
from dlprof.analysis.step.breakdown import part_least, part_noise
from dlprof.errors import DoesNotApply
from dlprof.units import count, duration, size


def check(
    copies: Maybe[pd.DataFrame],
    copy_gains: Maybe[pd.DataFrame],
    breakdown: Maybe[pd.DataFrame],
    job: Job,
) -> Estimate:
    """Estimate what the job would gain if its copies from pageable memory came from pinned memory."""
    if settings.on_cpu(job):
        raise DoesNotApply("the job trains on the CPU, where nothing is copied to a device")
    seen = copies.get()
    if not from_pageable(seen).any():
        number = seen.loc[seen["copy"] == "HtoD", "count"].sum()
        return nothing(f"{count(number, 'copy')} a step to the device, none from pageable memory")
    gains = copy_gains.get()
    gone = by_rank(gains[from_pageable(gains)], "gain_ns")
    return Estimate(
        gone_ns=gone,
        noise_ns=part_noise(breakdown.get(), "copy"),
        least_ns=part_least(breakdown.get(), "copy"),
        loses="is spent copying batches from pageable memory",
    )


def explain(estimate: Estimate, copies: pd.DataFrame, job: Job) -> Explanation:
    """Show how many these copies are, and how slow, on the rank that they cost most."""
    rank = estimate.worst
    mine = copies[from_pageable(copies) & (copies["rank"] == rank)]
    copied, ns, moved, exposed = mine[["count", "copy_ns", "bytes", "exposed_ns"]].sum()
    moved_in = f"{size(moved)} in " if moved >= 0 else ""
    rate = f", {size(moved / ns * 1e9)}/s" if moved > 0 and ns > 0 else ""
    pin = settings.training_loader(job, rank).get("pin_memory")
    now = f" (is {pin})" if pin is not None else ""
    return Explanation(
        title="Batches are copied to the device from pageable memory",
        summary=f"{moved_in}{count(copied, 'copy')} a step take {duration(ns)}{rate}, {duration(exposed)} of it with"
        " the device doing nothing else.",
        changes=(
            change("`tensor.pin_memory()` for what is not the loader's")
            if pin is True
            else change(f"`DataLoader(..., pin_memory=True)`{now}", pin_memory=(pin, True)),
            change("`batch = batch.to(device, non_blocking=True)`", non_blocking=(None, True)),
        ),
        evidence=copy_table(copies, rank),
        sure="Estimated by replaying the traced steps with copies as fast as from pinned memory, and not waited for.",
    )


RULE = Rule(
    "pageable_copy",
    "Copies from pageable memory",
    check,
    explain,
    saves_from=("copy", "input_wait", "host", "optimizer_host", "launch_latency"),
    notable=0.03,  # from where the analysis tools of NVIDIA and AMD advise a change of exposed pageable copies
)
