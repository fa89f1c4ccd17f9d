"""The script waits for copies that it need not wait for.

`tensor.to(device)` and `copy_` stop the host until the copy is done, and with it all that was queued before. Where the
memory is pinned, `non_blocking=True` only queues the copy: the device takes it in its turn, and the host meanwhile
launches what comes next. A device that runs dry in that wait has nothing to do until the host has launched again.

Needs a trace of a GPU run, whose copies name their memory: `Memcpy HtoD (Pinned -> Device)`. A copy counts that is
followed by synchronising within the same operator.

Saving: the traced steps replayed with no wait for such copies. They take as long as before (see `exposed_copy`).

What to change: `.to(device, non_blocking=True)`. The host must then not write into that memory before the copy is done;
a loader with `pin_memory=True` does not.
"""

from __future__ import annotations

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.compute.panels.kernels import copy_table
from dlprof.analysis.engine import Job, Maybe
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.host.syncs import together
from dlprof.analysis.step.breakdown import part_least, part_noise
from dlprof.errors import DoesNotApply
from dlprof.units import duration, often

_HOST = ("host", "optimizer_host")


def check(linked: Maybe[pd.DataFrame], breakdown: Maybe[pd.DataFrame], job: Job) -> Estimate:
    """Estimate what the job would gain without waits for pinned copies, from the device's idle time behind them."""
    if settings.on_cpu(job):
        raise DoesNotApply("the job trains on the CPU, where nothing is copied to a device")
    waits = linked.get()
    waits = waits[waits["copied"] == "pinned"]
    if not len(waits):
        return nothing("no copy from pinned memory is waited for")
    gains = together(job, waits)
    return Estimate(
        gone_ns=gains,
        noise_ns=part_noise(breakdown.get(), *_HOST),
        least_ns=part_least(breakdown.get(), *_HOST),
        loses="is idle device time because the script waited for a copy",
        seen=waits,
    )


def explain(estimate: Estimate, copies: pd.DataFrame, job: Job) -> Explanation:
    """Count the waits of the rank that they cost most."""
    rank = estimate.worst
    calls, ns, idle_ns = estimate.seen.loc[estimate.seen["rank"] == rank, ["calls", "ns", "idle_ns"]].sum()
    pin = settings.training_loader(job, rank).get("pin_memory")
    now = f" (`pin_memory` is {pin})" if pin is not None else ""
    call = f"`batch = batch.to(device, non_blocking=True)`{now}, for inputs and labels alike"
    return Explanation(
        title="The script waits for copies from pinned memory",
        summary=f"{often(calls).capitalize()} a step rank {rank} waits until a copy from pinned memory is done,"
        f" {duration(ns)} a step; the device then idles for {duration(idle_ns)}.",
        changes=(change(call, non_blocking=(None, True)),),
        evidence=copy_table(copies, rank),
        sure="Estimated by replaying the traced steps without these waits.",
    )


RULE = Rule(
    "blocking_copy",
    "Waiting for copies from pinned memory",
    check,
    explain,
    saves_from=("input_wait", "host", "optimizer_host", "launch_latency"),
)
