"""Many small collectives: each takes longer to start than to move its bytes.

A collective has a price that does not depend on its size: a launch, a handshake of all ranks, a first hop over every
link. Below some tens of kilobytes that is all of its time. The same bytes in few large collectives pay it few times.

Needs a trace with collectives and their sizes; where it lacks sizes, those of a DistributedDataParallel or FSDP2 model
follow from its parameters and the number of its exchanges. Waiting for one late rank is `straggler`'s.

Saving: their exposed transfer, but for as many collectives as are needed, each exposed for as long as one takes now,
as the last of the backward pass has nothing to hide behind. Their bytes are taken to cost nothing; but where two
classes of size show what an all-reduce on GPUs takes to start and for each byte, small are those that take longer to
start than to move, and bytes count. What all ranks wait for others that are late in turn shrinks with the root of how
often they meet, as independent delays grow with the root of the time. On a CPU FSDP2's work on its units counts, as if
the modules right above were the units; and waiting for a core, where the kernel shows it: what neither the loader's
workers nor the exchanges that are left could cause, if each ms of theirs held the training thread up for one.

What to change: larger buckets (`bucket_cap_mb`), `fully_shard` on whole blocks, gradients exchanged once a step and not
one by one, metrics reduced in one tensor; `forward_sync_buffers=False` (before torch 2.13 `broadcast_buffers=False`)
where they are buffers that DDP sends before each forward pass. With the newer name DDP still sends them once, as it
wraps the model.
"""

from __future__ import annotations

import math

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.communication.exchange_plans import (
    DDP_BUCKET,
    Fit,
    exposed_transfer,
    fewer_collectives,
    fitted,
    sized_collectives,
    transfer_noise,
)
from dlprof.analysis.communication.wrappers import sharding
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, nothing
from dlprof.analysis.panel import table
from dlprof.analysis.step.breakdown import contention
from dlprof.analysis.step.savings import own_time, saving
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.result import Panel
from dlprof.units import count, digits, duration, size

# So few collectives a step are not buckets: a loss, a gradient norm, a flag.
FEW = 8

# DDP's first bucket is to be ready early (torch.distributed._DEFAULT_FIRST_BUCKET_BYTES).
FIRST_BUCKET_BYTES = 1 << 20


def check(
    sized_collectives: Frame = needs(sized_collectives),
    fitted: Fit | None = needs(fitted),
    sharding: Maybe[Frame] = maybe(sharding),
    exposed_transfer: Maybe[pd.Series[float]] = maybe(exposed_transfer),
    own_time: Maybe[Frame] = maybe(own_time),
    contention: Maybe[Frame] = maybe(contention),
    transfer_noise: Maybe[float] = maybe(transfer_noise),
    job: Job = needs(JOB),
) -> Estimate:
    every, on_cpu = sized_collectives, settings.on_cpu(job)
    small = every[every["each_bytes"] < every["limit_bytes"]]
    n, total = float(small["calls"].sum()), float((small["each_bytes"] * small["calls"]).sum())
    if n <= FEW:
        return nothing(f"{count(n, 'collective')} below {size(float(every['limit_bytes'].iloc[0]))} a step")
    own, units, kept, around = own_time.get(), sharding.or_none() if on_cpu else None, 0.0, 0.0
    if units is not None:  # a GPU goes on while the host works on them
        kept, around = float((units["parents"] / units["units"]).iloc[0]), float(units["around_ns"].min())
    first = FIRST_BUCKET_BYTES if settings.model(job).get("ddp") else DDP_BUCKET
    buckets = 1 + math.ceil(max(0.0, total - first) / DDP_BUCKET)
    fewer = max(small["collective"].nunique(), buckets, math.ceil(n * kept))
    mean, fit = float(small["transfer_ns"].sum() / small["count"].sum()), None if on_cpu else fitted
    # Several at once are exposed in the same time.
    exposed = exposed_transfer.get() * float(small["exposed_ns"].sum() / max(every["exposed_ns"].sum(), 1.0))
    if fit is None:
        starts = (exposed - (exposed * fewer / n).clip(lower=min(fewer, n) * mean)).clip(lower=0.0)
    else:
        # All that is gone was exposed, as far as so much was; the last exchange stays so.
        then = min(fewer, n) * fit.start_ns + total * fit.byte_ns
        starts = (exposed - then / fewer).clip(lower=0.0, upper=max(n * mean - then, 0.0))
    # Every rank waits as long as the one that waits least: so long each is late itself.
    meets = float(own["wait_ns"].min()) * max(0.0, 1 - math.sqrt(fewer / n)) if own["known"].all() else 0.0
    meets *= float(small["wait_ns"].sum() / max(every["wait_ns"].sum(), 1.0))
    crowd = _crowded_out(contention, max(0.0, n - fewer) / every["calls"].sum()) if on_cpu else 0.0
    exchanges, gone = saving(own, starts), starts + around * (1 - kept) + crowd
    return Estimate(
        saving_ns=saving(own, gone) + meets,
        by_rank_ns={int(str(r)): ns + meets for r, ns in gone.items()},
        noise_ns=exchanges * transfer_noise.get(),
        within={"communication": exchanges + meets},
        loses="is spent starting small collectives",
        seen=(small, n, total, mean, fewer, fit, float(exposed.mean()), around, meets, crowd),
    )


def _crowded_out(contention: Maybe[Frame], gone: float) -> float:
    """Return how much sooner every rank's training thread would find a core, without a share of the collectives, ns."""
    if contention.lacking:
        return 0.0
    found = contention.get()
    less = found["others_ns"] * gone
    left = found["loader_ns"] + found["others_ns"] - less
    return float((found["delay_ns"] - left).clip(lower=0.0).clip(upper=less).min())


def explain(estimate: Estimate, mean_step_ns: float = needs(mean_step_ns), job: Job = needs(JOB)) -> Explanation:
    small, n, total, mean, fewer, fit, exposed, around, meets, crowd = estimate.seen
    moving = "moving the bytes is taken to cost nothing at this size"
    if fit is not None:
        moving = f"starting one takes {duration(fit.start_ns)}, moving all of it {duration(total * fit.byte_ns)}"
    return Explanation(
        title="Many small collectives",
        summary=f"{count(n, 'collective')} of {size(total / n)} a step, each of {duration(mean)}: {size(total)} in all;"
        f" for {duration(exposed)} of a step of {duration(mean_step_ns)} nothing is computed meanwhile"
        + (f", for {duration(crowd)} they leave no core to compute with" if crowd else "")
        + (f", and FSDP2 works for {duration(around)} on its units." if around else "."),
        changes=fewer_collectives(job, small, n, fewer),
        evidence=_evidence(small, exposed * job.world_size),
        sure=f"Estimated as {count(fewer, 'start')} a step in place of {digits(round(n, 1))}; {moving}"
        + ("; FSDP2 works as much less as it has fewer units" if around else "")
        + (f"; ranks late in turn wait {duration(meets)} less, as they synchronise less often" if meets else "")
        + (f"; threads that exchange leave a core free for {duration(crowd)} more." if crowd else "."),
    )


def _evidence(small: Frame, exposed_ns: float) -> Panel:
    """List the kinds; all exposed time is divided among them, for several at once are exposed only once."""
    share = small["exposed_ns"] / max((small["exposed_ns"] * small["ranks"]).sum(), 1)
    rows = small.assign(exposed_ns=share * exposed_ns, one_ns=small["transfer_ns"] / small["count"])
    headings = {"collective": "collective", "ranks": "ranks", "count": "calls a step", "each_bytes": "mean size_bytes"}
    headings |= {"one_ns": "transfer of one_ns", "exposed_ns": "exposed a step_ns"}
    return table("The small collectives of a step", rows.sort_values("exposed_ns", ascending=False), headings, most=12)


# FSDP2's work on a CPU is copying, and the host's.
_SAVES_FROM = ("communication", "computation", "host", "other")
RULE = Rule("Many small collectives", check, explain, _SAVES_FROM)
