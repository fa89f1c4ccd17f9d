"""Batches are copied to the device from pageable memory, and nothing hides the copies.

The device can only read memory that the system may not move. A copy from ordinary (pageable) memory is staged through a
small pinned buffer, piece by piece: it is slower, it holds the training thread, and it cannot overlap with computation.

Needs a trace of a GPU run, whose copies name their memory: `Memcpy HtoD (Pageable -> Device)`, and which links launches
to kernels.

Saving: the traced steps replayed with copies that take as long as from pinned memory, and that nobody waits for. How
fast those are, other copies of this trace tell, or the link that a GPU of this name has; where neither does, they are
taken to be as slow as now. Such a copy still keeps its place on the stream that computes: what hiding it behind
computation would give on top is the business of `exposed_copy`, once its memory is pinned.

What to change: `pin_memory=True` on the DataLoader, and `.to(device, non_blocking=True)` for the batch. Memory that
does not come from a loader: `tensor.pin_memory()` once, outside the loop.
"""

from __future__ import annotations

from dlprof.diagnosis import Clear, Rule
from dlprof.engine import Measured, by_rank
from dlprof.measures import settings
from dlprof.measures.breakdown import breakdown, part_least, part_noise
from dlprof.measures.copies import PINNED, copies, copy_gains, copy_table
from dlprof.measures.replay import own_time, saving
from dlprof.result import Finding
from dlprof.timeline.steps import mean_step_ns, of_step, step_means
from dlprof.units import count, duration, percent, size

# Exposed pageable copies are worth a change from 3 % of a step on (the advice of NVIDIA's and AMD's analysis tools).
NOTABLE_SHARE = 0.03


def check(run: Measured) -> Finding | Clear:
    """Look at the exposed host-to-device copies from pageable memory."""
    frame = run.frame(copies)
    to_device = frame[frame["copy"] == "HtoD"]
    pageable = to_device[to_device["memory"] == "pageable"]
    if not len(pageable):
        pinned = float(to_device["count"].sum())
        return Clear(f"{count(pinned, 'copy')} a step to the device, none from pageable memory")
    step = mean_step_ns(run)
    exposed = by_rank(pageable, "exposed_ns")
    gains = run.frame(copy_gains)
    gain = saving(run, by_rank(gains[gains["change"] == PINNED], "gain_ns"))
    share = gain / step
    if share < NOTABLE_SHARE:
        return Clear(f"pageable copies, but only {percent(share)} of the step")
    worst = max(exposed, key=lambda r: exposed[r])
    mine = pageable[pageable["rank"] == worst].iloc[0]
    loader = settings.training_loader(run, worst)
    pin = loader.get("pin_memory")
    said = f" (is {pin})" if pin is not None else ""
    moved = f"{size(mine['bytes'])} in " if mine["bytes"] >= 0 else ""
    rate = f", {size(mine['bytes'] / mine['copy_ns'] * 1e9)}/s" if mine["bytes"] > 0 and mine["copy_ns"] > 0 else ""
    return Finding(
        title="Batches are copied to the device from pageable memory",
        summary=f"{moved}{count(float(mine['count']), 'copy')} a step take {duration(mine['copy_ns'])}{rate},"
        f" {duration(mine['exposed_ns'])} of it with the device doing nothing else.",
        verdict=f"{percent(share)} {of_step(run)} copies batches from pageable memory.",
        noise_ns=part_noise(run, "copy"),
        least_ns=min(gain, part_least(run, "copy")),
        saving_ns=gain,
        advice=(
            f"`DataLoader(..., pin_memory=True)`{said}"
            if pin is not True
            else "`tensor.pin_memory()` for what is not the loader's",
            "`batch = batch.to(device, non_blocking=True)`",
        ),
        evidence=copy_table(frame, worst),
        ranks=tuple(sorted(exposed)),
        sure="Estimated by replaying the traced steps with copies as fast as from pinned memory, and not waited for.",
    )


RULE = Rule(
    "pageable_copy",
    "Copies from pageable memory",
    (breakdown, copies, copy_gains, own_time, step_means),
    check,
    saves_from=("copy", "input_wait", "host", "optimizer_host", "launch_latency"),
)
