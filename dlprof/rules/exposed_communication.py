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
from typing import Any

import pandas as pd

from dlprof.diagnosis import Clear, Rule
from dlprof.engine import Measured
from dlprof.errors import NotMeasured
from dlprof.measures import settings
from dlprof.measures.breakdown import breakdown, part
from dlprof.measures.collectives import collectives
from dlprof.measures.data_parallel import replication
from dlprof.measures.exchange_plans import (
    DDP_BUCKET,
    FEWEST,
    activations,
    exchange_plans,
    exposed_transfer,
    gain_noise,
    transfer_noise,
)
from dlprof.measures.replay import own_time
from dlprof.measures.waits import waits
from dlprof.result import Finding, Panel
from dlprof.timeline.steps import mean_step_ns, of_step, step_means
from dlprof.units import UNKNOWN, count, duration, percent, size

# Notable, high and severe are 5, 10 and 30 % with the analysis tools that grade it; it speaks from the first on.
NOTABLE_SHARE = 0.05

# DDP's buckets hold 25 MB unless told otherwise; collectives below a tenth of that are dominated by their start.
SMALL_BYTES = 2_500_000


def check(run: Measured) -> Finding | Clear:
    """Look at what is exposed of the collectives, and how much of that is transfer."""
    frame = run.frame(collectives)
    if not len(frame):
        raise NotMeasured(
            "one rank: nothing to exchange" if run.world_size < 2 else "no collectives in the traced steps"
        )
    if run.world_size < 2 and not run.lacking(replication):
        return Clear("what one process exchanges between its GPUs is nn.DataParallel's")
    own = run.frame(own_time).set_index("rank")
    transfer = exposed_transfer(run)
    split = bool(own["known"].all())
    step = mean_step_ns(run)
    plans = run.frame(exchange_plans)
    best = _best(plans, step)
    gain = float(best["gain_ns"])
    share = gain / step
    if share < NOTABLE_SHARE:
        waiting = f"; {percent(own['wait_ns'].max() / step)} waits for other ranks" if split else ""
        return Clear(f"{percent(share)} of the step is exposed transfer{waiting}")
    worst = int(str(transfer.idxmax()))
    per_step = len(frame[frame["rank"] == worst]) / _traced(run, worst)
    more = (
        f", {duration(own['wait_ns'][worst])} more waits for other ranks" if split and own["wait_ns"][worst] > 0 else ""
    )
    unsplit = "" if split else f" Part of it may be waiting for a late rank: {_untold(run)}."
    return Finding(
        title="Communication is not hidden behind computation",
        summary=f"{count(per_step, 'collective')} a step on rank {worst}; for {duration(transfer[worst])} of"
        f" {duration(step)} data is in transfer and nothing is computed{more}.{unsplit}",
        verdict=_verdict(run, str(best["key"]), share, float(transfer.mean()) / step, split),
        noise_ns=gain_noise(run, gain),
        saving_ns=gain,
        advice=_advice(run, frame[frame["rank"] == worst], per_step, str(best["key"]), "once" in set(plans["key"])),
        evidence=_evidence(run, plans, step),
        ranks=tuple(sorted(int(r) for r in transfer[transfer >= transfer.max() / 2].index)),
        sure=f"Estimated as {_ESTIMATES[best['key']]}: {best['why']}.{unsplit}",
    )


def _untold(run: Measured) -> str:
    """Say why nobody knows what of the communication is waiting."""
    if run.missing_ranks:
        return "not every rank's trace is here"
    try:
        run.frame(waits)
    except NotMeasured as e:
        return str(e)
    return "not every rank's waiting is known"


_ESTIMATES = {
    "hidden": "the exposed transfer hidden",
    "bucket": "the exposed transfer with other buckets",
    "half": "half as many exchanges",
    "once": "one exchange for each step of the optimizer",
    "bytes": "half as many bytes",
}


# What the forward pass waits for, by the collective.
_AT_ONCE = {
    "all_to_all": (
        "the forward pass waits for its all-to-all: exchange the next batch's ids and rows while this one computes, as"
        " TorchRec's pipelines do; rows in 16 bits",
    ),
    "": (
        "the forward pass waits for what it exchanges: pair `ColwiseParallel` with `RowwiseParallel` layers, which"
        " exchange once a pair, with `SequenceParallel` between pairs; let fewer ranks share a layer",
        "on GPUs asynchronous tensor parallelism, under `torch.compile`: products are cut up and sent piece by piece",
    ),
}

# What the best change is worth, where it is less than all that is exposed.
_WORTH = {
    "hidden": "computation could hide {}",
    "bucket": "other buckets would save {}",
    "half": "half as many exchanges would save {}",
    "bytes": "half as many bytes would save {}",
}

# The advice where nothing of the job is known but its trace.
_CHANGES = {
    "hidden": "overlap the exchange with computation: gradients during the backward pass, all else before it is needed",
    "half": "exchange half as often: add up the gradients of two batches before the optimizer steps",
    "bytes": "exchange gradients in 16 bits: half as many bytes",
}

# From this share of what is exposed on it is all of it: estimates are no surer.
_ALL = 0.9


def _verdict(run: Measured, key: str, share: float, exposed: float, split: bool) -> str:
    if key == "once":
        return f"{percent(share)} {of_step(run)} is communication that the optimizer does not need."
    late = "ranks that are not here" if run.missing_ranks else "late ranks"
    waiting = "" if split else f", or waiting for {late}"
    worth = "" if share >= _ALL * exposed else f"; {_WORTH[key].format(percent(share))}"
    return f"{percent(max(share, exposed))} {of_step(run)} is communication that nothing hides{waiting}{worth}."


def _best(plans: pd.DataFrame, step: float) -> pd.Series[Any]:
    """Choose a plan: exchanges that are made for nothing go first, where they are worth it; else what gives most."""
    once = plans[(plans["key"] == "once") & (plans["gain_ns"] >= NOTABLE_SHARE * step)]
    best = plans[plans["key"] != "quarter"].sort_values("gain_ns", na_position="first")
    return (once if len(once) else best).iloc[-1]


def _traced(run: Measured, rank: int) -> int:
    means = run.frame(step_means).set_index("rank")
    return max(int(means["traced_steps"][rank]), 1)


def _advice(run: Measured, mine: pd.DataFrame, per_step: float, best: str, seldom: bool) -> tuple[str, ...]:
    ddp, fsdp = settings.model(run).get("ddp"), settings.model(run).get("fsdp")
    sized = mine["bytes"][mine["bytes"] > 0]
    advice = []
    if seldom:
        advice.append("`with model.no_sync():` around all batches but the last one before the optimizer steps")
    if needed := activations(run):
        advice += _AT_ONCE.get(needed, _AT_ONCE[""])
    elif per_step > 8 and len(sized) and sized.median() < SMALL_BYTES:
        what = f"{per_step:.0f} collectives of {size(float(sized.median()))} (median) a step"
        if ddp:
            advice.append(f"larger buckets: {what}; `bucket_cap_mb=25` or more (is {ddp.get('bucket_cap_mb')})")
        elif fsdp:
            advice.append(f"larger shards: {what}; `fully_shard` whole blocks, not single layers")
        else:
            advice.append(
                f"{what}: exchange gradients in large buckets during the backward pass (`DistributedDataParallel`)"
            )
    elif not ddp and not fsdp and settings.model(run):
        advice.append(
            f"`DistributedDataParallel{_buckets(mine)}` or FSDP2 (`fully_shard`): they exchange during the"
            " backward pass"
        )
    if ddp and ddp.get("find_unused_parameters"):
        advice.append("`find_unused_parameters=False` (is True) unless some are unused: it delays the exchange")
    if any(f.get("backend") == "gloo" and (f.get("device") or {}).get("type") == "cuda" for f in run.facts.values()):
        advice.append("`init_process_group('nccl')` (is gloo): gloo sends GPU tensors through the host")
    if fsdp:
        advice.append("`fully_shard(..., reshard_after_forward=False)` where memory allows: no second all-gather")
        advice.append("half the bytes: `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)`")
    if ddp:
        fewer = "" if seldom else "; fewer exchanges: `no_sync()`"
        advice.append(f"half the bytes: `model.register_comm_hook(None, fp16_compress_hook)`{fewer}")
    return tuple(advice) or (_CHANGES.get(best, _CHANGES["hidden"]),)


def _buckets(mine: pd.DataFrame) -> str:
    """Return what to set of DistributedDataParallel's buckets where all gradients would fit into one."""
    sized = mine.loc[mine["bytes"] > 0].groupby("step")["bytes"].sum()
    if not len(sized) or not FEWEST << 20 <= float(sized.mean()) <= DDP_BUCKET:
        return ""
    return f"(..., bucket_cap_mb={float(sized.mean()) / FEWEST / 2**20:.0f})"


def _evidence(run: Measured, plans: pd.DataFrame, step: float) -> Panel:
    rows = [("as it is", duration(step), "", f"{percent(_share(run, step))} of it is communication that nothing hides")]
    for plan in plans.to_dict("records"):
        known = math.isfinite(plan["gain_ns"])
        then = step - plan["gain_ns"]
        told = (duration(then), f"{step / then:.2f} ×") if known else (UNKNOWN, UNKNOWN)
        rows.append((plan["change"], *told, plan["why"]))
    note = "What another backend would take is not known: none was measured."
    columns = ("change", "predicted step", "speed", "because")
    return Panel("table", "Predicted step by how the ranks exchange", tuple(rows), columns, note=note)


def _share(run: Measured, step: float) -> float:
    return max(part(run, "communication").values(), default=0.0) / step


RULE = Rule(
    "exposed_communication",
    "Communication that nothing hides",
    (breakdown, collectives, exchange_plans, own_time, replication, step_means, transfer_noise, waits),
    check,
    saves_from=("communication",),
)
