"""The GPU's memory runs out again and again, and PyTorch empties its cache to go on.

PyTorch keeps freed memory for the next tensor. Where a tensor fits into none of it and the device has no more to give,
the allocator waits for the device, gives everything unused back, and asks the device again: each of these calls takes
as long as many kernels, and nothing is launched meanwhile. The job nearly dies, and lives on slowly.

Needs what PyTorch's CUDA allocator tells beside the light layer: how often it had to retry, a few times a second.

Saving: how much longer the steady steps between two readings with a retry are than the others, spread over all.

What to change: a smaller batch or `torch.utils.checkpoint`; `PYTORCH_ALLOC_CONF=expandable_segments:True` (before torch
2.9 `PYTORCH_CUDA_ALLOC_CONF`), which lets freed pieces of different sizes be used together; inputs of few different
sizes (pad to buckets); no tensors kept beyond the step that made them.
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.engine import Job, Maybe, by_rank
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing, worst
from dlprof.errors import NotMeasured
from dlprof.result import Change, Panel
from dlprof.units import count, size

_MOST_RANKS = 16


def check(retry_cost: Maybe[pd.DataFrame], memory_use: Maybe[pd.DataFrame], job: Job) -> Estimate:
    """Estimate what the steady steps with retries take longer."""
    if settings.on_cpu(job):
        raise NotMeasured("the job trains on the CPU")
    frame = retry_cost.get()
    retries = int(frame["retries"].sum())
    if not retries:
        return nothing("no allocation had to be tried again")
    mine = frame[frame["retries"] > 0].dropna(subset=["ns"])
    if not len(mine):
        raise NotMeasured(
            f"{count(retries, 'allocation')} had to be tried again, so often that no steps without are there to compare"
        )
    # A rank that retries holds up all that wait for it.
    cost = by_rank(mine, "ns")
    told = mine[mine["rank"] == worst(cost)].to_dict("records")[0]
    return Estimate(
        saving_ns=cost[told["rank"]],
        by_rank_ns=cost,
        noise_ns=float(told["noise_ns"]),
        loses=f"is getting memory from the GPU again, for {count(retries, 'allocation')}",
        explain=lambda: _explain(memory_use.get(), job, frame, told),
    )


def _explain(memory_use: pd.DataFrame, job: Job, frame: pd.DataFrame, told: dict[Any, Any]) -> Explanation:
    rank = int(told["rank"])
    use = memory_use.set_index("rank").to_dict("index")[rank]
    of = f" of {size(use['total_bytes'])}" if use["total_bytes"] > 0 else ""
    failed = f" {count(told['ooms'], 'allocation')} failed." if told["ooms"] else ""
    return Explanation(
        title="PyTorch empties its cache of GPU memory again and again",
        summary=f"On rank {rank} {count(told['retries'], 'allocation')} succeeded only after the cache was emptied,"
        f" with {size(use['peak_reserved_bytes'])}{of} reserved; the {told['retried']} steps around them last longer"
        f" than the {told['plain']} others.{failed}",
        changes=_changes(job, rank),
        evidence=_evidence(frame),
        sure="Measured as the difference between steps around a retry and steps without; what else sets them apart,"
        " longer inputs for one, counts as well.",
    )


def _changes(job: Job, rank: int) -> tuple[Change, ...]:
    variable, conf = settings.allocator(job, rank)
    batch = settings.training_loader(job, rank).get("batch_size")
    changes = (
        change(f"a smaller batch{f' (is {batch})' if batch else ''}", numerics=True),
        change("`torch.utils.checkpoint` on the largest blocks"),
        change("inputs of few different sizes: pad to buckets"),
    )
    expandable = "expandable_segments:True"
    if expandable in (conf or ""):
        return changes
    said = f"`{variable}={expandable}` (is {conf or 'not set'})"
    return (change(said, numerics=False, **{variable: (conf, expandable)}), *changes)


def _evidence(frame: pd.DataFrame) -> Panel:
    told = ("rank", "retries", "ooms", "retried", "plain")
    rows = tuple(
        (*(int(row[c]) for c in told), float(row["ns"]) if math.isfinite(row["ns"]) else None)
        for row in frame.head(_MOST_RANKS).to_dict("records")
    )
    columns = ("rank", "retries", "failed", "steps around them", "other steps", "longer, a mean step_ns")
    return Panel("table", "Retries of the allocator in the steady steps", rows, columns)


RULE = Rule("allocator_retries", "Retries of the allocator", check)
