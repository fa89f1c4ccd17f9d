"""The GPU's memory ran out: tensors hold so much of it that a request could not be served.

A snapshot of PyTorch's allocator has the request that failed, and what each line of the script held at that moment.

Needs a snapshot with its events: `torch.cuda.memory._record_memory_history()` before training, and
`torch.cuda.memory._dump_snapshot(file)` where `torch.OutOfMemoryError` is caught, or in an observer
(`torch._C._cuda_attach_out_of_memory_observer`). The file alone, or beside a trace.

Saving: none of a step. The job could not go on, which is why this is told before any saving. Where free memory was
enough and lay in pieces, `fragmentation` tells it instead.

What to change: what holds most. Activations (lines of `forward`): a smaller batch, `torch.utils.checkpoint`, a lower
precision. The optimizer's state (lines of `step`): shard it (FSDP, ZeRO), or keep it in 8 bits. Losses and outputs that
are kept from step to step: detach them.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.engine import Job, Maybe
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.memory.snapshot import NO_SNAPSHOT
from dlprof.analysis.panel import table
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.units import count, percent, size

_COLUMNS = {"site": "line", "via": "calls", "bytes": "held_bytes", "share": "of all_share", "blocks": "blocks"}
MOST = 12  # lines that are shown


def check(memory_state: Maybe[pd.DataFrame], job: Job) -> Estimate:
    """Find the devices on which a request failed though not enough was free."""
    frame = memory_state.or_none()
    if frame is None:
        if settings.on_cpu(job):
            raise DoesNotApply("the job trains on the CPU: there is no GPU memory to run out of")
        raise NotMeasured(memory_state.why() if memory_state.broke else NO_SNAPSHOT)
    failed = frame[frame["moment"] == "oom"]
    if not len(failed):
        return nothing("no request for memory failed while the snapshot recorded", "failure")
    full = failed[failed["free_bytes"] < failed["requested_bytes"]]
    if not len(full):
        return nothing("memory ran out with enough of it free, in pieces: see fragmentation", "failure")
    return Estimate(scope="failure", by_rank_ns=dict.fromkeys(full["rank"].tolist(), 1.0), seen=full)


def explain(estimate: Estimate, memory_holders: pd.DataFrame, job: Job) -> Explanation:
    """Show what held memory when the request failed, on the first rank."""
    row = estimate.seen.to_dict("records")[0]
    rank, device = row["rank"], row["device"]
    mine = memory_holders[
        (memory_holders["rank"] == rank) & (memory_holders["device"] == device) & (memory_holders["moment"] == "oom")
    ]
    top: dict[Any, Any] = (
        mine.to_dict("records")[0] if len(mine) else {"site": "no known line", "bytes": 0.0, "share": 0.0}
    )
    batch = settings.training_loader(job, rank).get("batch_size")
    left = f", the device had {size(row['device_free_bytes'])} left" if row["device_free_bytes"] >= 0 else ""
    at = f" at {row['site']}" if row["site"] else ""
    again = f" ({count(row['ooms'], 'request')} failed)" if row["ooms"] > 1 else ""
    return Explanation(
        title=f"The memory of GPU {device} ran out",
        summary=f"On rank {rank} a request for {size(row['requested_bytes'])}{at} failed{again}. Tensors held"
        f" {size(row['allocated_bytes'])} of the {size(row['reserved_bytes'])} that PyTorch had reserved{left}."
        f" {percent(top['share'])} of it was allocated in {top['site']}.",
        verdict=f"Rank {rank} ran out of GPU memory: {size(row['allocated_bytes'])} were held, {percent(top['share'])}"
        f" of that from {top['site']}, when {size(row['requested_bytes'])} more were asked for{at}.",
        changes=(
            change(f"a smaller batch{f' (is {batch})' if batch else ''}", numerics=True),
            change(f"hold less from `{top['site']}`: `torch.utils.checkpoint` there, or a lower precision"),
            change("shard parameters and the optimizer's state over the ranks (`fully_shard`)"),
        ),
        evidence=table(f"What held memory when it ran out, rank {rank}", mine, _COLUMNS, most=MOST),
        sure="Read from the allocator's own events. What other libraries and processes hold on the GPU is not in them.",
    )


RULE = Rule("Running out of GPU memory", check, explain)
