"""The job ran out of memory: a request on a GPU failed, or the kernel killed a process for want of host memory.

Needs one of these: a snapshot of PyTorch's allocator with its events (`dlprof wrap --memory`, or a script that calls
`torch.cuda.memory._record_memory_history()`, and `_dump_snapshot(file)` where it catches `torch.OutOfMemoryError`); the
error that ended a recorded process; or a recorded process that was killed, with the kernel's count of out-of-memory
kills and the last readings. The parts of memory are those counted in an earlier step.

Saving: none of a step. The job could not go on, so this finding comes before any saving. Where a snapshot shows that
enough memory was free, but in pieces, `fragmentation` reports it instead.

What to change: changes that are predicted to bring the peak below the available memory, each with its peak. If none is
known, whatever holds most. Activations (lines of `forward`): a smaller batch, `torch.utils.checkpoint`, a lower
precision. Validation with gradients on: `torch.inference_mode()`. Optimizer state (lines of `step`): shard it (FSDP,
ZeRO), or keep it in 8 bits. Losses and outputs kept from step to step: detach them.
"""

from __future__ import annotations

from math import isnan
from typing import Any

from dlprof.analysis import settings
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.memory.changes import memory_what_if
from dlprof.analysis.memory.failures import ERROR, KERNEL, KILLED, SNAPSHOT, cures, memory_failures
from dlprof.analysis.memory.memory import memory_composition, memory_use
from dlprof.analysis.memory.snapshot import NO_SNAPSHOT, memory_holders, memory_state
from dlprof.analysis.panel import table
from dlprof.analysis.panels.compute import LINES
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.result import Change
from dlprof.units import count, percent, size

_PARTS = {"part": "part", "bytes": "size_bytes", "known": "how it is known"}
MOST = 12  # lines that are shown

_SURE = {
    SNAPSHOT: "Read from the allocator's own events.",
    ERROR: "Read from the error that ended the process.",
    KERNEL: "The kernel counted an out-of-memory kill while the job ran; it does not say of which process.",
    KILLED: "A process was killed while nearly all memory was in use; who killed it is not known.",
}


def check(
    memory_failures: Frame = needs(memory_failures),
    memory_state: Maybe[Frame] = maybe(memory_state),
    memory_use: Maybe[Frame] = maybe(memory_use),
    job: Job = needs(JOB),
) -> Estimate:
    """Find devices on which a request failed because too little was free, and processes that were killed."""
    failed = memory_failures
    full = failed[(failed["how"] != SNAPSHOT) | (failed["free_bytes"] < failed["requested_bytes"])]
    if len(full):
        return Estimate(scope="failure", by_rank_ns=dict.fromkeys(full["rank"].tolist(), 1.0), seen=full)
    if len(failed):
        return nothing("a request failed although enough memory was free, in pieces: see fragmentation", "failure")
    if memory_state:
        return nothing("no request for memory failed while the snapshot was recorded", "failure")
    use = memory_use.or_none()
    if use is not None and (use["ooms"] == 0).all() and job.run.exit.get("code") == 0:
        return nothing("no request for memory failed", "failure")
    if settings.on_cpu(job):
        raise DoesNotApply("the job trains on the CPU, and nothing shows that it ran out of memory")
    raise NotMeasured(memory_state.why() if memory_state.broke else NO_SNAPSHOT)


def explain(
    estimate: Estimate,
    memory_holders: Maybe[Frame] = maybe(memory_holders),
    memory_composition: Maybe[Frame] = maybe(memory_composition),
    memory_what_if: Maybe[Frame] = maybe(memory_what_if),
    job: Job = needs(JOB),
) -> Explanation:
    """Show what held the first rank's memory when it ran out, and which changes would have fitted."""
    row: dict[Any, Any] = estimate.seen.to_dict("records")[0]
    rank = row["rank"]
    held, holders = memory_composition.or_none(), memory_holders.or_none()
    mine = (
        None
        if held is None
        else held[(held["rank"] == rank) & ((held["device"] == "cpu") == (row["device"] == "host"))]
    )
    lines = None if holders is None else holders[(holders["rank"] == rank) & (holders["moment"] == "oom")]
    evidence, most = None, ""
    if lines is not None and len(lines):
        evidence = table(f"Allocations when memory ran out, rank {rank}", lines, LINES, most=MOST)
        most = f" {percent(lines['share'].iloc[0])} of the allocated memory comes from {lines['site'].iloc[0]}."
    elif mine is not None and len(mine):
        parts = mine.sort_values("bytes", ascending=False, kind="stable")
        evidence = table(f"Memory by part in an earlier step, rank {rank}", parts, _PARTS)
        share = float(parts["bytes"].iloc[0] / parts["bytes"].sum())
        most = f" In an earlier step the largest part was {parts['part'].iloc[0]} ({percent(share)})."
    what = "The host" if row["device"] == "host" else f"GPU {row['device']}"
    message = _message(row)
    top = None if lines is None or not len(lines) else str(lines["site"].iloc[0])
    return Explanation(
        title=f"{what} ran out of memory",
        summary=f"On rank {rank} {message}.{most}",
        verdict=f"Rank {rank} ran out of {'the host' if row['device'] == 'host' else 'GPU'}"
        f"{chr(39) + 's' if row['device'] == 'host' else ''} memory: {message}.",
        changes=(
            *_changes(cures(memory_what_if.or_none(), row), top, settings.training_loader(job, rank).get("batch_size")),
            *_of_evaluation(job.facts[rank].get("evaluation") or {}),
        ),
        evidence=evidence,
        sure=f"{_SURE[str(row['how'])]} Memory of other libraries and processes is not included.",
    )


def _message(row: dict[Any, Any]) -> str:
    """Return what happened: in which step, how much was requested, where, and how much was allocated."""
    step = f" in step {row['step'] + 1}" if row["step"] >= 0 and row["how"] != SNAPSHOT else ""
    of = "" if isnan(row["total_bytes"]) else f" of {size(row['total_bytes'])}"
    if row["how"] in (KERNEL, KILLED):
        held = (
            "" if isnan(row["allocated_bytes"]) else f"; at the last reading it used {size(row['allocated_bytes'])}{of}"
        )
        return f"the process was killed{step}{held}"
    request = "a request" if isnan(row["requested_bytes"]) else f"a request for {size(row['requested_bytes'])}"
    at = f" at {row['site']}" if row["site"] else ""
    again = f" ({count(row['ooms'], 'request')} failed)" if row["ooms"] > 1 else ""
    held = "" if isnan(row["allocated_bytes"]) else f"; {size(row['allocated_bytes'])} were allocated"
    reserved = "" if isnan(row["reserved_bytes"]) else f", {size(row['reserved_bytes'])} reserved by PyTorch"
    left = "" if isnan(row["device_free_bytes"]) else f", {size(row['device_free_bytes'])} free on the device"
    return f"{request}{at} failed{step}{again}{held}{reserved}{left}"


def _changes(known: list[Change], top: str | None, batch: object) -> tuple[Change, ...]:
    if known:
        return tuple(known)
    return (
        change(f"a smaller batch{f' (is {batch})' if batch else ''}", numerics=True),
        change(f"allocate less in `{top}`: `torch.utils.checkpoint` there, or a lower precision")
        if top
        else change("store fewer activations: `torch.utils.checkpoint`, or a lower precision"),
        change("shard parameters and optimizer state over the ranks (`fully_shard`)"),
    )


def _of_evaluation(seen: dict[str, Any]) -> tuple[Change, ...]:
    """Return what frees the memory of graphs that no backward pass uses; () where gradients are off there."""
    steps, graphs = seen.get("steps") or 0, seen.get("with_graph") or 0
    text = "around validation, in which gradients are on: outputs that it keeps keep all activations of their batches"
    return (change(f"`with torch.inference_mode():` {text}"),) if graphs > steps / 2 else ()


RULE = Rule("Out of memory", check, explain)
