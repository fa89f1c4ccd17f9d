"""A request for GPU memory failed although enough was free: the free memory is fragmented.

PyTorch's allocator reserves segments from the device and splits them into blocks. It cannot return a segment that is
partly in use, and two free blocks in different segments cannot serve one request.

Needs a snapshot of PyTorch's allocator with its events, see `out_of_memory`.

Saving: none of a step. With `expandable_segments:True` free blocks can be joined, and this request would have been
served from the reserved memory. That helps until allocated memory alone fills the device; the difference between
reserved and allocated shows how far that is. Without a failed request the rule reports how much memory is fragmented,
but finds nothing: fragmentation costs nothing until memory runs out.

What to change: `PYTORCH_ALLOC_CONF=expandable_segments:True` (before torch 2.9 `PYTORCH_CUDA_ALLOC_CONF`). Inputs of
fewer different sizes: pad to buckets. Free memory in a CUDA graph's pool, or of another stream, cannot serve other
requests.
"""

from __future__ import annotations

from dlprof.analysis import settings
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.memory.snapshot import NO_SNAPSHOT, memory_state
from dlprof.analysis.panel import table
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.units import percent, size

_COLUMNS = {"rank": "rank", "device": "GPU", "moment": "when", "allocated_bytes": "allocated_bytes"}
_COLUMNS |= {"reserved_bytes": "reserved_bytes", "free_bytes": "free_bytes", "split_bytes": "fragmented_bytes"}
_COLUMNS |= {"largest_bytes": "largest free block_bytes", "requested_bytes": "requested_bytes"}
_MOMENTS = {"end": "snapshot", "oom": "failed request"}


def check(memory_state: Maybe[Frame] = maybe(memory_state), job: Job = needs(JOB)) -> Estimate:
    """Find devices on which a request failed although the free blocks were large enough in total."""
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
        f"no request failed for lack of a large enough block; {percent(share)} of the {size(most['reserved_bytes'])}"
        f" reserved on rank {most['rank']} is fragmented, the largest free block {size(most['largest_bytes'])}",
        "failure",
    )


def explain(estimate: Estimate, memory_state: Frame = needs(memory_state), job: Job = needs(JOB)) -> Explanation:
    """Compare the free memory with the request, on the first rank."""
    row = estimate.seen.to_dict("records")[0]
    rank = row["rank"]
    variable, conf = settings.allocator(job, rank)
    conf = conf or (job.trace_facts[rank].get("allocator") or {}).get("conf") or None
    expandable = "expandable_segments:True"
    grows = (job.trace_facts[rank].get("allocator") or {}).get("expandable") or expandable in (conf or "")
    known = row["largest_bytes"] >= 0
    largest = f", the largest block {size(row['largest_bytes'])}" if known else ""
    at = f" at {row['site']}" if row["site"] else ""
    text = f"`{variable}={expandable}` (is {conf or 'not set'})"
    state = memory_state.assign(moment=memory_state["moment"].map(_MOMENTS))
    return Explanation(
        title=f"GPU {row['device']} ran out of memory that was free but fragmented",
        summary=f"On rank {rank} a request for {size(row['requested_bytes'])}{at} failed although"
        f" {size(row['free_bytes'])} of the {size(row['reserved_bytes'])} reserved were free{largest}.",
        verdict=f"Rank {rank} ran out of GPU memory with {size(row['free_bytes'])} of it free: no free block was"
        f" as large as the {size(row['requested_bytes'])} requested{at}.",
        changes=(
            *([] if grows else [change(text, numerics=False, training=False, **{variable: (conf, expandable)})]),
            change("inputs of fewer different sizes: pad to buckets"),
            change("`torch.cuda.empty_cache()` between phases that need different sizes"),
        ),
        evidence=table("GPU memory at the snapshot, and at the failed request", state, _COLUMNS, most=16),
        sure="Read from the allocator's own events"
        + ("" if known else "; its segments are expandable, and where their free blocks are is not known")
        + f". With all free blocks joined, at most {size(row['free_bytes'])} could be allocated.",
    )


RULE = Rule("Fragmented GPU memory", check, explain)
