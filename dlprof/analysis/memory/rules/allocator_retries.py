"""The GPU's memory runs out again and again, and PyTorch empties its cache to go on.

PyTorch keeps freed memory for the next tensor. Where a tensor fits into none of it and the device has no more to give,
the allocator waits for the device, gives everything unused back, and asks the device again: each of these calls takes
as long as many kernels, and nothing is launched meanwhile.

Needs the readings of PyTorch's CUDA allocator: how often it had to retry.

Saving: how much longer the steady steps between two readings with a retry are than the others, spread over all.

What to change: a smaller batch or `torch.utils.checkpoint`; `PYTORCH_ALLOC_CONF=expandable_segments:True` (before torch
2.9 `PYTORCH_CUDA_ALLOC_CONF`), which lets freed pieces of different sizes be used together; inputs of few different
sizes (pad to buckets); no tensors kept beyond their step.
"""

from __future__ import annotations

from dlprof.analysis import settings
from dlprof.analysis.engine import JOB, Frame, Job, by_rank, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing, worst
from dlprof.analysis.memory.memory import memory_use, retry_cost
from dlprof.analysis.panel import table
from dlprof.analysis.settings import EXPANDABLE
from dlprof.errors import NotMeasured
from dlprof.units import count, is_now, size

_COLUMNS = {"rank": "rank", "retries": "retries", "ooms": "failed", "retried": "steps around them"}
_COLUMNS |= {"plain": "other steps", "ns": "longer, a mean step_ns"}


def check(retry_cost: Frame = needs(retry_cost)) -> Estimate:
    retries = int(retry_cost["retries"].sum())
    if not retries:
        return nothing("no allocation had to be tried again")
    retried = count(retries, "allocation")
    mine = retry_cost[retry_cost["retries"] > 0].dropna(subset=["ns"])
    if not len(mine):
        raise NotMeasured(f"{retried} had to be tried again, so often that there are no steps without to compare with")
    # A rank that retries holds up all that wait for it.
    cost = by_rank(mine, "ns")
    rank = worst(cost)
    return Estimate(
        saving_ns=cost[rank],
        by_rank_ns=cost,
        noise_ns=by_rank(mine, "noise_ns")[rank],
        loses=f"is getting memory from the GPU again, for {retried}",
    )


def explain(
    estimate: Estimate,
    retry_cost: Frame = needs(retry_cost),
    memory_use: Frame = needs(memory_use),
    job: Job = needs(JOB),
) -> Explanation:
    rank = estimate.worst
    cost, use = (estimate.rows(frame).iloc[0] for frame in (retry_cost, memory_use))
    of = f" of {size(use['total_bytes'])}" if use["total_bytes"] > 0 else ""
    failed = f" {count(cost['ooms'], 'allocation')} failed." if cost["ooms"] else ""
    variable, conf = settings.allocator(job, rank)
    text = f"`{variable}={EXPANDABLE}` (is {conf or 'not set'})"
    segments = change(text, numerics=False, training=False, **{variable: (conf, EXPANDABLE)})
    batch = settings.training_loader(job, rank).get("batch_size")
    return Explanation(
        title="PyTorch empties its cache of GPU memory again and again",
        summary=f"On rank {rank} {count(cost['retries'], 'allocation')} succeeded only after the cache was emptied,"
        f" with {size(use['peak_reserved_bytes'])}{of} reserved; the {cost['retried']:.0f} steps around them last"
        f" longer than the {cost['plain']:.0f} others.{failed}",
        changes=(
            *([] if EXPANDABLE in (conf or "") else [segments]),
            change(f"a smaller batch{is_now(batch)}", numerics=True),
            change("`torch.utils.checkpoint` on the largest blocks"),
            change("inputs of few different sizes: pad to buckets"),
        ),
        evidence=table("Retries of the allocator in the steady steps", retry_cost, _COLUMNS, most=16),
        sure="Measured as the difference between steps around a retry and steps without; whatever else differs,"
        " such as longer inputs, counts too.",
    )


RULE = Rule("Retries of the allocator", check, explain, only_with="gpu")
