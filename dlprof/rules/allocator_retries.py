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

import pandas as pd

from dlprof.diagnosis import Clear, Rule
from dlprof.engine import Measured, by_rank
from dlprof.errors import NotMeasured
from dlprof.measures import settings
from dlprof.measures.memory import memory_use, retry_cost
from dlprof.result import Finding, Panel
from dlprof.timeline.steps import mean_step_ns, of_step, step_means
from dlprof.units import count, duration, percent, size

# No retry is meant to be there, so it is worth a word from where any finding is (diagnosis.LEAST_SHARE).
NOTABLE_SHARE = 0.02

_MOST_RANKS = 16


def check(run: Measured) -> Finding | Clear:
    """Look at the retries in the steady steps, and at what these steps take longer."""
    if settings.on_cpu(run):
        raise NotMeasured("the job trains on the CPU")
    frame = run.frame(retry_cost)
    retries = int(frame["retries"].sum())
    if not retries:
        return Clear("no allocation had to be tried again")
    mine = frame[frame["retries"] > 0]
    if mine["ns"].isna().all():
        raise NotMeasured(
            f"{count(retries, 'allocation')} had to be tried again, so often that no steps without are there to compare"
        )
    step = mean_step_ns(run)
    # A rank that retries holds up all that wait for it.
    cost = by_rank(mine.dropna(subset=["ns"]), "ns")
    worst = max(cost, key=lambda r: cost[r])
    gain = cost[worst]
    if gain / step < NOTABLE_SHARE:
        return Clear(f"{count(retries, 'allocation')} tried again, for {percent(gain / step)} of the step")
    told = mine[mine["rank"] == worst].to_dict("records")[0]
    use = run.frame(memory_use).set_index("rank").to_dict("index")[worst]
    total = use["total_bytes"]
    of = f" of {size(total)}" if total and math.isfinite(total) else ""
    failed = f" {count(told['ooms'], 'allocation')} failed." if told["ooms"] else ""
    return Finding(
        title="PyTorch empties its cache of GPU memory again and again",
        summary=f"On rank {worst} {count(told['retries'], 'allocation')} succeeded only after the cache was emptied,"
        f" with {size(use['peak_reserved_bytes'])}{of} reserved; the {told['retried']} steps around them last longer"
        f" than the {told['plain']} others.{failed}",
        verdict=f"{percent(gain / step)} {of_step(run)} is getting memory from the GPU again.",
        saving_ns=gain,
        noise_ns=float(told["noise_ns"]),
        advice=_advice(run, worst),
        evidence=_evidence(frame),
        ranks=tuple(sorted(r for r, ns in cost.items() if ns >= gain / 2)),
        sure="Measured as the difference between steps around a retry and steps without; what else sets them apart,"
        " longer inputs for one, counts as well.",
    )


def _advice(run: Measured, rank: int) -> tuple[str, ...]:
    variable, conf = settings.allocator(run, rank)
    batch = settings.training_loader(run, rank).get("batch_size")
    advice = [f"a smaller batch{f' (is {batch})' if batch else ''}, or `torch.utils.checkpoint` on the largest blocks"]
    if "expandable_segments:True" not in (conf or ""):
        advice.insert(0, f"`{variable}=expandable_segments:True` (is {conf or 'not set'})")
    return (*advice, "inputs of few different sizes: pad to buckets")


def _evidence(frame: pd.DataFrame) -> Panel:
    rows = tuple(
        (
            f"rank {row['rank']}",
            *(row[c] for c in ("retries", "ooms", "retried", "plain")),
            duration(row["ns"]) if math.isfinite(row["ns"]) else "–",
        )
        for row in frame.head(_MOST_RANKS).to_dict("records")
    )
    columns = ("", "retries", "failed", "steps around them", "other steps", "longer, a mean step")
    return Panel("table", "Retries of the allocator in the steady steps", rows, columns)


RULE = Rule("allocator_retries", "Retries of the allocator", (memory_use, retry_cost, step_means), check)
