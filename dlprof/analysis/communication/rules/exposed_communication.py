"""Ranks exchange data while none of them computes.

Collectives cost nothing while computation runs beside them. Exposed are those that nothing hides: gradients reduced
after the backward pass instead of during it, many small collectives, or more bytes than the link can carry meanwhile.

Needs a trace with collectives. With the traces of all ranks, waiting for a late rank is told apart from transfer and
left to `straggler`; where a rank's trace is missing, the two cannot be told apart and the summary says so.

Saving: the best of what one change can give, by replay over the ranks. The exposed transfer hidden, as far as there is
computation that hides nothing yet: of the backward pass, where that is told, for gradients are not there before it; on
a CPU, where sending takes cores as well, no more than the cores stand idle. Or fewer bytes, or half as many exchanges.
The table predicts the step for each; where two classes of size tell what a collective takes to start and for each byte,
for other buckets too. Where two changes are made, the second gives less.
Where batches exchange their gradients after which the optimizer does not step, one exchange for each of its steps is
the saving, though hiding might give more: it is the same training, and needs no computation to hide behind.
On a CPU, ranks of one host that exchange less compute at the same time, and share what the host's memory carries. Where
gradients outweigh what is computed, less comes back than is predicted: of the step of a large vocabulary on two cores
9 % in the mean of five recordings, where 22 % were predicted.

A forward pass that exchanges (tensor, sequence or expert parallel) is told apart, for what it exchanges is needed at
once: nothing is predicted of exchanging that seldom, and hiding it takes another part of the batch.

What to change: let DDP or FSDP overlap the exchange with the backward pass; larger buckets where collectives are many
and small; `no_sync()` while gradients accumulate; compressed gradients (`fp16_compress_hook`); NCCL, not gloo, on GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.communication.exchange_plans import DDP_BUCKET, FEWEST, gain_noise
from dlprof.analysis.engine import Job, Maybe, by_rank
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.step.breakdown import part
from dlprof.errors import NotMeasured
from dlprof.result import Change, Forecast, Panel
from dlprof.units import count, duration, percent, size

# Notable, high and severe are 5, 10 and 30 % with the analysis tools that grade it; it speaks from the first on.
NOTABLE_SHARE = 0.05

# DDP's buckets hold 25 MB unless told otherwise; collectives below a tenth of that are dominated by their start.
SMALL_BYTES = 2_500_000


def check(
    collectives: pd.DataFrame,
    replication: Maybe[pd.DataFrame],
    exposed_transfer: Maybe[pd.Series[float]],
    mean_step_ns: float,
    exchange_plans: Maybe[pd.DataFrame],
    own_time: Maybe[pd.DataFrame],
    transfer_noise: Maybe[pd.DataFrame],
    of_step: str,
    step_means: pd.DataFrame,
    waits: Maybe[pd.DataFrame],
    activations: Maybe[str],
    breakdown: Maybe[pd.DataFrame],
    job: Job,
) -> Estimate:
    """Estimate what the best plan saves of the exposed transfer."""
    if not len(collectives):
        raise NotMeasured(
            "one rank: nothing to exchange" if job.world_size < 2 else "no collectives in the traced steps"
        )
    if job.world_size < 2 and not replication.lacking:
        return nothing("what one process exchanges between its GPUs is nn.DataParallel's")
    transfer, step = exposed_transfer.get(), mean_step_ns
    best = _best(exchange_plans.get(), step)
    gain, exposed = float(best["gain_ns"]), float(transfer.mean())
    lost = gain if best["key"] == "once" else max(gain, exposed)
    own = own_time.get()
    waiting = own["wait_ns"].max() / step if own["known"].all() else 0.0
    return Estimate(
        saving_ns=gain,
        by_rank_ns={int(str(r)): ns for r, ns in transfer.items()},
        noise_ns=gain_noise(transfer_noise.get(), gain),
        lost_ns=lost,
        loses=_loses(own_time, job, str(best["key"]), gain / step, exposed / step),
        summary=f"{percent(lost / step)} {of_step} is exposed transfer, {percent(waiting)} waits for other ranks"
        if waiting
        else "",
        explain=lambda: _explain(
            own_time.get(),
            collectives,
            mean_step_ns,
            step_means,
            waits,
            exchange_plans.get(),
            activations.get(),
            breakdown.get(),
            job,
            best,
            transfer,
        ),
    )


def _explain(
    own_time: pd.DataFrame,
    collectives: pd.DataFrame,
    mean_step_ns: float,
    step_means: pd.DataFrame,
    waits: Maybe[pd.DataFrame],
    exchange_plans: pd.DataFrame,
    activations: str,
    breakdown: pd.DataFrame,
    job: Job,
    best: pd.Series[Any],
    transfer: pd.Series[float],
) -> Explanation:
    own, step = own_time.set_index("rank"), mean_step_ns
    split, worst = bool(own["known"].all()), int(str(transfer.idxmax()))
    mine = collectives[collectives["rank"] == worst]
    per_step = len(mine) / max(by_rank(step_means, "traced_steps")[worst], 1)
    waited = float(own["wait_ns"][worst]) if split else 0.0
    more = f", {duration(waited)} more waits for other ranks" if waited > 0 else ""
    unsplit = "" if split else f" Part of it may be waiting for a late rank: {_untold(waits, job)}."
    return Explanation(
        title="Communication is not hidden behind computation",
        summary=f"{count(per_step, 'collective')} a step on rank {worst}; for {duration(transfer[worst])} of"
        f" {duration(step)} data is in transfer and nothing is computed{more}.{unsplit}",
        changes=tuple(_changes(exchange_plans, activations, job, mine, per_step, best))
        or (_UNKNOWN_JOB.get(best["key"], _UNKNOWN_JOB["hidden"]),),
        evidence=_evidence(breakdown, exchange_plans, step),
        sure=f"Estimated as {_ESTIMATES[best['key']]}: {best['why']}.{unsplit}",
        forecasts=tuple(
            Forecast("bucket_cap_mb", str(cap), step - float(best["gain_ns"])) for cap in _buckets(job, best)
        ),
    )


def _buckets(job: Job, best: pd.Series[Any]) -> tuple[float, ...]:
    """Return the bucket_cap_mb that the best plan sets, if it sets another than there is."""
    ddp, cap = settings.model(job).get("ddp"), float(best["bucket_cap_mb"])
    return (cap,) if ddp and best["key"] == "bucket" and cap != ddp.get("bucket_cap_mb") else ()


def _untold(waits: Maybe[pd.DataFrame], job: Job) -> str:
    """Say why nobody knows what of the communication is waiting."""
    if job.missing_ranks:
        return "not every rank's trace is here"
    try:
        waits.get()
    except NotMeasured as e:
        return str(e)
    return "not every rank's waiting is known"


_ESTIMATES = {
    "hidden": "the exposed transfer hidden",
    "bucket": "other buckets",
    "half": "half as many exchanges",
    "once": "one exchange for each step of the optimizer",
    "bytes": "half as many bytes",
}

# What the forward pass waits for, by the collective.
_AT_ONCE = {
    "all_to_all": (
        change(
            "the forward pass waits for its all-to-all: exchange the next batch's ids and rows while this one computes,"
            " as TorchRec's pipelines do"
        ),
        change("half the bytes: exchange the rows in 16 bits", numerics=True),
    ),
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

# What to change where nothing of the job is known but its trace.
_UNKNOWN_JOB = {
    "hidden": change(
        "overlap the exchange with computation: gradients during the backward pass, all else before it is needed"
    ),
    "half": change(
        "exchange half as often: add up the gradients of two batches before the optimizer steps", numerics=True
    ),
    "bytes": change("exchange gradients in 16 bits: half as many bytes", numerics=True),
}

# From this share of what is exposed on it is all of it: estimates are no surer.
_ALL = 0.9


def _loses(own_time: Maybe[pd.DataFrame], job: Job, key: str, share: float, exposed: float) -> str:
    """Say what the step loses, and what the best change gives where that is less."""
    if key == "once":
        return "is communication that the optimizer does not need"
    late = "ranks that are not here" if job.missing_ranks else "late ranks"
    waiting = "" if own_time.get()["known"].all() else f", or waiting for {late}"
    worth = "computation could hide" if key == "hidden" else f"{_ESTIMATES[key]} would save"
    less = "" if share >= _ALL * exposed else f"; {worth} {percent(share)}"
    return f"is communication that nothing hides{waiting}{less}"


def _best(plans: pd.DataFrame, step: float) -> pd.Series[Any]:
    """Choose a plan: exchanges that are made for nothing go first, where they are worth it; else what gives most."""
    once = plans[(plans["key"] == "once") & (plans["gain_ns"] >= NOTABLE_SHARE * step)]
    best = plans[plans["key"] != "quarter"].sort_values("gain_ns", na_position="first")
    return (once if len(once) else best).iloc[-1]


def _changes(
    exchange_plans: pd.DataFrame, activations: str, job: Job, mine: pd.DataFrame, per_step: float, best: pd.Series[Any]
) -> Iterator[Change]:
    ddp, fsdp = settings.model(job).get("ddp") or {}, settings.model(job).get("fsdp")
    seldom = "once" in set(exchange_plans["key"])
    sized = mine["bytes"][mine["bytes"] > 0]
    if seldom:
        yield change("`with model.no_sync():` around all batches but the last one before the optimizer steps")
    buckets = _buckets(job, best)
    for cap in buckets:
        yield change(best["change"], bucket_cap_mb=(ddp.get("bucket_cap_mb"), cap))
    if needed := activations:
        yield from _AT_ONCE.get(needed, _AT_ONCE[""])
    elif not buckets and per_step > 8 and len(sized) and sized.median() < SMALL_BYTES:
        what = f"{per_step:.0f} collectives of {size(float(sized.median()))} (median) a step"
        if ddp:
            now = ddp.get("bucket_cap_mb")
            yield change(f"larger buckets: {what}; `bucket_cap_mb=25` or more (is {now})", bucket_cap_mb=(now, 25.0))
        elif fsdp:
            yield change(f"larger shards: {what}; `fully_shard` whole blocks, not single layers")
        else:
            yield change(
                f"{what}: exchange gradients in large buckets during the backward pass (`DistributedDataParallel`)"
            )
    elif not ddp and not fsdp and settings.model(job):
        yield _wrapped(mine)
    if ddp and ddp.get("find_unused_parameters"):
        text = "`find_unused_parameters=False` (is True) unless some are unused: it delays the exchange"
        yield change(text, find_unused_parameters=(True, False))
    if any(f.get("backend") == "gloo" and (f.get("device") or {}).get("type") == "cuda" for f in job.facts.values()):
        text = "`init_process_group('nccl')` (is gloo): gloo sends GPU tensors through the host"
        yield change(text, backend=("gloo", "nccl"))
    if fsdp:
        text = "`fully_shard(..., reshard_after_forward=False)` where memory allows: no second all-gather"
        yield change(text, reshard_after_forward=(None, False))
        text = "half the bytes: `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)`"
        half = (None, "torch.bfloat16")
        yield change(text, numerics=True, param_dtype=half, reduce_dtype=half)
    if ddp:
        fewer = "" if seldom else "; fewer exchanges: `no_sync()`"
        text = f"half the bytes: `model.register_comm_hook(None, fp16_compress_hook)`{fewer}"
        yield change(text, numerics=True)


def _wrapped(mine: pd.DataFrame) -> Change:
    """Return what wraps a model, and how large its buckets should be where all gradients would fit into one."""
    text = "`DistributedDataParallel{}` or FSDP2 (`fully_shard`): they exchange during the backward pass"
    sized = mine.loc[mine["bytes"] > 0].groupby("step")["bytes"].sum()
    if not len(sized) or not FEWEST << 20 <= float(sized.mean()) <= DDP_BUCKET:
        return change(text.format(""))
    cap = round(float(sized.mean()) / FEWEST / 2**20)
    return change(text.format(f"(..., bucket_cap_mb={cap})"), bucket_cap_mb=(None, float(cap)))


def _evidence(breakdown: pd.DataFrame, exchange_plans: pd.DataFrame, step: float) -> Panel:
    exposed = percent(max(part(breakdown, "communication").values(), default=0.0) / step)
    rows = [("as it is", step, 1.0, f"{exposed} of it is communication that nothing hides")]
    for plan in exchange_plans.to_dict("records"):
        then = step - plan["gain_ns"]
        told = (then, step / then) if math.isfinite(then) else (None, None)
        rows.append((plan["change"], *told, plan["why"]))
    note = "What another backend would take is not known: none was measured."
    columns = ("change", "predicted step_ns", "speed_times", "because")
    return Panel("table", "Predicted step by how the ranks exchange", tuple(rows), columns, note=note)


RULE = Rule(
    "exposed_communication",
    "Communication that nothing hides",
    check,
    saves_from=("communication",),
    notable=NOTABLE_SHARE,
)
