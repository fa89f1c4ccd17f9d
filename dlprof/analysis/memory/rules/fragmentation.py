"""A request for GPU memory failed though enough of it was free: what is free lies in pieces.

PyTorch's allocator keeps what it got from the device in segments, and cuts blocks from them. A segment that is used in
part cannot be given back, and two free pieces in different segments cannot serve one request.

Needs a snapshot of PyTorch's allocator with its events, see `out_of_memory`.

Saving: none of a step. With `expandable_segments:True` free pieces are joined, and this request would have been served
from what was reserved. That lasts until tensors alone fill the memory: how far that is, the difference between reserved
and allocated shows. Without a failed request the rule says how much lies in pieces, and finds nothing: until memory
runs out it costs nothing.

What to change: `PYTORCH_ALLOC_CONF=expandable_segments:True` (before torch 2.9 `PYTORCH_CUDA_ALLOC_CONF`). Inputs of
few different sizes: pad to buckets. Memory of a graph's own pool, or of another stream, serves nobody else.
"""

from __future__ import annotations

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.engine import Job, Maybe
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.memory.snapshot import NO_SNAPSHOT
from dlprof.analysis.panel import table
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.units import percent, size

_COLUMNS = {"rank": "rank", "device": "GPU", "moment": "when", "allocated_bytes": "by tensors_bytes"}
_COLUMNS |= {"reserved_bytes": "reserved_bytes", "free_bytes": "free of it_bytes", "split_bytes": "in pieces_bytes"}
_COLUMNS |= {"largest_bytes": "largest piece_bytes", "requested_bytes": "asked for_bytes"}


def check(memory_state: Maybe[pd.DataFrame], job: Job) -> Estimate:
    """Find the devices on which a request failed that all free pieces together could have served."""
    frame = memory_state.or_none()
    if frame is None:
        if settings.on_cpu(job):
            raise DoesNotApply("the job trains on the CPU: PyTorch's allocator of GPU memory is not used")
        raise NotMeasured(memory_state.why() if memory_state.broke else NO_SNAPSHOT)
    failed = frame[(frame["moment"] == "oom") & (frame["free_bytes"] >= frame["requested_bytes"])]
    if len(failed):
        return Estimate(scope="failure", by_rank_ns=dict.fromkeys(failed["rank"].tolist(), 1.0), seen=failed)
    end = frame[frame["moment"] == "end"]
    if not len(end):
        raise NotMeasured("the snapshot is cut off before its blocks")
    most = end.iloc[int((end["split_bytes"] / end["reserved_bytes"].clip(lower=1)).argmax())]
    share = most["split_bytes"] / max(most["reserved_bytes"], 1)
    return nothing(
        f"no request failed for want of a large enough piece; {percent(share)} of the {size(most['reserved_bytes'])}"
        f" reserved on rank {most['rank']} is free between tensors, the largest piece {size(most['largest_bytes'])}",
        "failure",
    )


def explain(estimate: Estimate, memory_state: pd.DataFrame, job: Job) -> Explanation:
    """Compare what was free with what was asked for, on the first rank."""
    row = estimate.seen.to_dict("records")[0]
    rank = row["rank"]
    variable, conf = settings.allocator(job, rank)
    conf = conf or (job.trace_facts[rank].get("allocator") or {}).get("conf") or None
    expandable = "expandable_segments:True"
    grows = (job.trace_facts[rank].get("allocator") or {}).get("expandable") or expandable in (conf or "")
    known = row["largest_bytes"] >= 0
    largest = f", the largest piece {size(row['largest_bytes'])}" if known else ""
    at = f" at {row['site']}" if row["site"] else ""
    text = f"`{variable}={expandable}` (is {conf or 'not set'})"
    return Explanation(
        title=f"The free memory of GPU {row['device']} lay in pieces when it ran out",
        summary=f"On rank {rank} a request for {size(row['requested_bytes'])}{at} failed with"
        f" {size(row['free_bytes'])} free of the {size(row['reserved_bytes'])} reserved{largest}.",
        verdict=f"Rank {rank} ran out of GPU memory with {size(row['free_bytes'])} of it free: no piece was as large as"
        f" the {size(row['requested_bytes'])} asked for{at}.",
        changes=(
            *([] if grows else [change(text, numerics=False, **{variable: (conf, expandable)})]),
            change("inputs of few different sizes: pad to buckets"),
            change("`torch.cuda.empty_cache()` between phases that need different sizes"),
        ),
        evidence=table("Memory when the snapshot was taken, and when it ran out", memory_state, _COLUMNS, most=16),
        sure="Read from the allocator's own events"
        + ("" if known else "; its segments grow, and how their free pieces lay is not followed")
        + f". With free pieces joined, {size(row['free_bytes'])} could be allocated, and no more.",
    )


RULE = Rule("Free GPU memory in pieces", check, explain)
