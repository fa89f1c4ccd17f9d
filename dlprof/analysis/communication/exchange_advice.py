"""What to change in how the ranks exchange, by what they exchange and what wraps the model."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.communication.exchange_plans import DDP_BUCKET, FEWEST
from dlprof.analysis.communication.overlap import GRADIENTS
from dlprof.analysis.engine import Job
from dlprof.result import Change, change
from dlprof.units import count, digits, size

# Collectives below a tenth of DDP's buckets are dominated by their start; a few of them are hardly worth a change.
_OF_BUCKET = 2_500_000
_FEW = 8

# What the forward pass waits for, by the collective; experts: all-to-alls of their tokens; "": any other.
_AT_ONCE = {
    "all_to_all": (
        change(
            "the forward pass waits for its all-to-all: exchange the next batch's ids and rows while this one computes,"
            " as TorchRec's pipelines do"
        ),
        change("half the bytes: exchange the rows in 16 bits", numerics=True),
    ),
    "experts": (
        change(
            "the forward pass waits for its tokens: compute another half of the batch, or experts that all tokens pass,"
            " while they travel; more experts on each host's ranks, and fewer between hosts"
        ),
        change("half the bytes: send tokens in 16 or 8 bits", numerics=True),
    ),
    "broadcast": (change("the forward pass waits for a broadcast: make it before the step that needs it, or seldom"),),
    "": (
        change(
            "the forward pass waits for what it exchanges: pair `ColwiseParallel` with `RowwiseParallel` layers, which"
            " exchange once a pair, with `SequenceParallel` between pairs; let fewer ranks share a layer"
        ),
        change(
            "on GPUs asynchronous tensor parallelism, under `torch.compile`: products are cut up and sent piece by"
            " piece"
        ),
    ),
}

_LESS = "exchange half as often: add up the gradients of two batches before the optimizer steps"
_HALF = change(_LESS, numerics=True, training=True)

# What to change where nothing of the job is known but its trace, by the best plan.
_UNKNOWN_JOB = {
    "bytes": change("exchange gradients in 16 bits: half as many bytes", numerics=True),
    "": change(
        "overlap the exchange with computation: gradients during the backward pass, all else before it is needed"
    ),
}


def advice(
    job: Job, best: pd.Series[Any], accumulates: bool, activations: str, collectives: pd.DataFrame, per_step: float
) -> tuple[Change, ...]:
    """Return what to change, first what the best plan changes, where a setting makes it.

    `accumulates`: exchanges are made for nothing. `collectives`: those of one rank; `per_step`: how many in a step.
    """
    if best["key"] == "half":
        return (_HALF,)
    model = settings.model(job)
    ddp, fsdp, cap = model.get("ddp") or {}, model.get("fsdp"), new_bucket(job, best)
    now, sized = ddp.get("bucket_cap_mb"), collectives.loc[collectives["bytes"] > 0]
    median, half = float(sized["bytes"].median()), (None, "torch.bfloat16")
    many = not activations and cap is None and per_step > _FEW and median < _OF_BUCKET
    what = f"{per_step:.0f} collectives of {size(median)} (median) a step"
    wrap = "exchange gradients in large buckets during the backward pass (`DistributedDataParallel`)"
    larger = f"larger buckets: {what}; `bucket_cap_mb=25` or more (is {now})"
    hide = "smaller buckets (`bucket_cap_mb`): their exchange begins earlier in the backward pass"
    nccl = "`init_process_group('nccl')` (is gloo): gloo sends GPU tensors through the host"
    keep = "`fully_shard(..., reshard_after_forward=False)` where memory allows: no second all-gather"
    mixed = "half the bytes: `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)`"
    hook = "half the bytes: `model.register_comm_hook(None, fp16_compress_hook)`"
    late = "record the traces of all ranks, which show whether this is waiting for a late one"
    offered: tuple[tuple[Any, Change], ...] = (
        (best["key"] == "waits", change(late)),
        (accumulates, change("`with model.no_sync():` around all batches but the last one before the optimizer steps")),
        (cap is not None, change(best["change"], bucket_cap_mb=(now, cap))),
        *((activations, needed) for needed in _at_once(activations, model)),
        (many and ddp, change(larger, bucket_cap_mb=(now, 25.0))),
        (many and fsdp, change(f"larger shards: {what}; `fully_shard` whole blocks, not single layers")),
        (many and not ddp and not fsdp, change(f"{what}: {wrap}")),
        (model and not (many or activations or ddp or fsdp), _wrapped(sized)),
        (ddp and best["key"] == "hidden" and not many and not activations, change(hide)),
        (settings.through_host(job), change(nccl, backend=("gloo", "nccl"))),
        (fsdp, change(keep, reshard_after_forward=(None, False))),
        (fsdp, change(mixed, numerics=True, param_dtype=half, reduce_dtype=half)),
        (ddp, change(hook, numerics=True)),
        (ddp and not accumulates, _HALF),
    )
    fitting = tuple(one for applies, one in offered if applies)
    return fitting or (_UNKNOWN_JOB.get(best["key"], _UNKNOWN_JOB[""]),)


def unbroadcast() -> Change:
    """Return the change that ends that."""
    text = (
        "`DistributedDataParallel(..., broadcast_buffers=False)` (is True): before each forward pass it sends rank 0's"
        " buffers, as batch norm's statistics, to all ranks; each then keeps its own"
    )
    return change(text, numerics=True, broadcast_buffers=(True, False))


def _at_once(collective: str, model: settings.Settings) -> tuple[Change, ...]:
    """Return what to change where the forward pass waits for a collective."""
    if collective == "broadcast" and settings.broadcasts_buffers(model):
        return (unbroadcast(),)
    if collective in _AT_ONCE or not model.get("ddp"):
        return _AT_ONCE.get(collective, _AT_ONCE[""])
    # A layer that ranks share, and DistributedDataParallel replicates, is nothing that a plain script has.
    own = f"the forward pass waits for an {collective.replace('_', '-')} of its own"
    return (change(f"{own}, as `SyncBatchNorm` layers and metrics make them: fewer of them, or several in one"),)


def fewer_collectives(job: Job, small: pd.DataFrame, n: float, fewer: int) -> tuple[Change, ...]:
    """Return what makes most of the small collectives fewer, by what they are."""
    model, metrics = settings.model(job), change("reduce metrics and flags in one tensor, and not in every step")
    kind = str(small.groupby("collective")["calls"].sum().idxmax())
    if model.get("fsdp"):
        return (change("`fully_shard` whole blocks and not single layers: one all-gather a block"),)
    if not model.get("ddp"):
        together = (
            "exchange gradients together: `DistributedDataParallel` does, in buckets of 25 MB during the backward pass"
        )
        return (change(together), metrics)
    if kind == "broadcast" and settings.broadcasts_buffers(model):
        return (unbroadcast(),)
    cap = model["ddp"].get("bucket_cap_mb")
    if kind in GRADIENTS and not (isinstance(cap, (int, float)) and cap >= DDP_BUCKET / 2**20):
        now = digits(cap) if isinstance(cap, (int, float)) else cap
        text = f"`bucket_cap_mb=25` (is {now}): {count(fewer, 'exchange')} a step, not {n:.0f}"
        return (change(text, bucket_cap_mb=(cap, DDP_BUCKET / 2**20)),)
    # Full buckets are not small: these are the script's own.
    return (metrics, change(f"most of them are of kind {kind}, which the script calls: call it for several at once"))


def new_bucket(job: Job, best: pd.Series[Any]) -> float | None:
    """Return the bucket_cap_mb that the best plan sets; None where it sets none, or what there is."""
    cap, now = float(best["bucket_cap_mb"]), (settings.model(job).get("ddp") or {}).get("bucket_cap_mb")
    return None if math.isnan(cap) or cap == now else cap


def _wrapped(sized: pd.DataFrame) -> Change:
    """Return what wraps a model, and how large its buckets should be where all gradients would fit into one."""
    text = "`DistributedDataParallel{}` or FSDP2 (`fully_shard`): they exchange during the backward pass"
    total = float(sized.groupby("step")["bytes"].sum().mean())
    if not FEWEST << 20 <= total <= DDP_BUCKET:
        return change(text.format(""))
    cap = round(total / FEWEST / 2**20)
    return change(text.format(f"(..., bucket_cap_mb={cap})"), bucket_cap_mb=(None, float(cap)))
