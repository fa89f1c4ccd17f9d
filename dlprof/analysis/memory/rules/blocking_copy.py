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

from dlprof.analysis import settings
from dlprof.analysis.engine import JOB, Frame, Job, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.host.gaps import HOST, SAVES_FROM
from dlprof.analysis.host.waiting import gains_without, linked
from dlprof.analysis.memory.copies import copies
from dlprof.analysis.panels.compute import copy_table
from dlprof.units import duration, often


def check(linked: Frame = needs(linked), job: Job = needs(JOB)) -> Estimate:
    waits = linked[linked["copied"] == "pinned"]
    if not len(waits):
        return nothing("no copy from pinned memory is waited for")
    return Estimate(
        gone_ns=gains_without(job, waits),
        noise_of=HOST,
        least_of=HOST,
        loses="is idle device time because the script waited for a copy",
        seen=waits,
    )


def explain(estimate: Estimate, copies: Frame = needs(copies), job: Job = needs(JOB)) -> Explanation:
    rank = estimate.worst
    calls, ns, idle_ns = estimate.rows(estimate.seen)[["calls", "ns", "idle_ns"]].sum()
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


RULE = Rule("Waiting for copies from pinned memory", check, explain, saves_from=SAVES_FROM, only_with="gpu")
