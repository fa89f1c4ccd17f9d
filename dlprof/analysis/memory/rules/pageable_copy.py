"""Batches are copied to the device from pageable memory, and nothing hides the copies.

The device can only read memory that the system may not move. A copy from ordinary (pageable) memory is staged through a
small pinned buffer, piece by piece: it is slower, it holds the training thread, and it cannot overlap with computation.

Needs a trace of a GPU run that links launches to kernels; its copies are named `Memcpy HtoD (Pageable -> Device)`.

Saving: the traced steps replayed with copies that take as long as from pinned memory, and no wait for them. Their
rate is that of other copies of this trace, or of the link that a GPU of this name has; else they are as slow as now.
They keep their place on the stream that computes; hiding them as well is what `exposed_copy` is about. A step takes no
less than pinning its batches takes the loader's one thread for that, or without workers the training thread.

What to change: `pin_memory=True` on the DataLoader, and `.to(device, non_blocking=True)` for the batch. Memory that
does not come from a loader: `tensor.pin_memory()` once, outside the loop. Where there is no loader at all: what batches
are drawn from on the device, where it fits, and indexed there.
"""

from __future__ import annotations

from dlprof.analysis import settings
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, by_rank, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.host.gaps import SAVES_FROM
from dlprof.analysis.memory.copies import NOTABLE_SHARE, copies, copy_gains, from_pageable
from dlprof.analysis.panels.compute import copy_table
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.units import count, duration, is_now, size


def check(
    copies: Frame = needs(copies),
    copy_gains: Maybe[Frame] = maybe(copy_gains),
    mean_step_ns: float = needs(mean_step_ns),
) -> Estimate:
    if not from_pageable(copies).any():
        number = copies.loc[copies["copy"] == "HtoD", "count"].sum()
        return nothing(f"{count(number, 'copy')} a step to the device, none from pageable memory")
    gains = copy_gains.get()
    gains, mine = gains[from_pageable(gains)], copies[from_pageable(copies)].groupby("rank")[["bytes", "exposed_ns"]]
    (moved, exposed), pinning, gone = mine.sum().max(), gains["pinning_ns"].max(), by_rank(gains, "gain_ns")
    what = size(moved) if moved > 0 else "batches"
    takes = f"one thread takes about {duration(pinning)} for it, and a step {duration(mean_step_ns)}"
    no_help = f"{what} a step are copied from pageable memory; pinning would not help: {takes}; fewer bytes would"
    return Estimate(
        gone_ns=gone,
        lost_ns=min(float(exposed), mean_step_ns),
        summary=no_help if pinning and max(gone.values()) < NOTABLE_SHARE * mean_step_ns <= exposed else "",
        noise_of=("copy",),
        least_of=("copy",),
        loses="is spent copying batches from pageable memory",
    )


def explain(estimate: Estimate, copies: Frame = needs(copies), job: Job = needs(JOB)) -> Explanation:
    rank = estimate.worst
    mine = estimate.rows(copies[from_pageable(copies)])
    copied, ns, moved, exposed = mine[["count", "copy_ns", "bytes", "exposed_ns"]].sum()
    moved_in = f"{size(moved)} in " if moved >= 0 else ""
    rate = f", {size(moved / ns * 1e9)}/s" if moved > 0 and ns > 0 else ""
    pin = settings.training_loader(job, rank).get("pin_memory")
    pinned = change(f"`DataLoader(..., pin_memory=True)`{is_now(pin)}", pin_memory=(pin, True))
    if settings.lacks_loader(job):
        pinned = change(
            "keep what the batches are drawn from as tensors on the GPU, where it fits, and index them there; else"
            " `pin_memory()` of the tensors that are copied"
        )
    return Explanation(
        title="Batches are copied to the device from pageable memory",
        summary=f"{moved_in}{count(copied, 'copy')} a step take {duration(ns)}{rate}, {duration(exposed)} of it with"
        " the device doing nothing else.",
        changes=(
            change("`tensor.pin_memory()` for what is not the loader's") if pin is True else pinned,
            change("`batch = batch.to(device, non_blocking=True)`", non_blocking=(None, True)),
        ),
        evidence=copy_table(copies, rank),
        sure="Estimated by replaying the traced steps with copies from pinned memory, as fast as one thread pins.",
    )


_SAVES_FROM = ("copy", *SAVES_FROM)
RULE = Rule("Copies from pageable memory", check, explain, _SAVES_FROM, notable=NOTABLE_SHARE, only_with="gpu")
