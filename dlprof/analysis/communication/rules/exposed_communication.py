"""Ranks exchange data while none of them computes.

Collectives cost nothing while computation overlaps with them. Exposed are those that nothing hides: gradients reduced
after the backward pass instead of during it, many small collectives, or more bytes than the link can carry meanwhile.

Needs a trace with collectives. With the traces of all ranks, waiting for a late rank is separated from transfer and
left to `straggler`; where a rank's trace is missing that is not possible, and the summary says so.

Saving: the best of what one change can give, by replay over the ranks; two changes give less than their sum. The
exposed transfer hidden, as far as there is computation that hides nothing yet (of the backward pass, where that is
known, for gradients are not there before it; on a CPU, no more than the cores stand idle, for sending takes cores). Or
half the bytes, or half as many exchanges; where two classes of size show what a collective takes to start and for each
byte, other buckets too. If batches without a step of the optimizer exchange their gradients, one exchange for each of
its steps, though hiding might give more: it is the same training. Where buffers are not broadcast any more, on a CPU
also what copying them takes. What a forward pass exchanges (tensor, sequence or
expert parallel) is needed at once: nothing is predicted of exchanging that less often. On a CPU, where gradients
outweigh what is computed, less comes back, for the ranks of one host then share its memory's bandwidth: of a large
vocabulary's step on two cores 9 % in the mean of five recordings, where 22 % were predicted.

What to change: let DDP or FSDP overlap the exchange with the backward pass; larger buckets where collectives are many
and small; `no_sync()` while gradients accumulate; compressed gradients (`fp16_compress_hook`); NCCL, not gloo, on GPUs;
`forward_sync_buffers=False` (before torch 2.13 `broadcast_buffers=False`) where it is buffers that DDP sends to all
ranks before each forward pass. With the newer name DDP still sends them once, as it wraps the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.communication.collectives import NO_COLLECTIVES, ONE_RANK, collectives, waits
from dlprof.analysis.communication.exchange_plans import (
    NOTABLE_SHARE,
    activations,
    advice,
    best_plan,
    exchange_plans,
    exposed_transfer,
    new_bucket,
    transfer_noise,
)
from dlprof.analysis.communication.experts import routed
from dlprof.analysis.communication.wrappers import replication
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule
from dlprof.analysis.panel import table
from dlprof.analysis.source.line_shares import call_sites, costliest, costly_lines
from dlprof.analysis.source.patches import Call
from dlprof.analysis.step.breakdown import breakdown, part
from dlprof.analysis.step.savings import own_time
from dlprof.analysis.timeline.steps import mean_step_ns, of_step, step_means
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.result import Forecast, Panel, Place
from dlprof.units import count, duration, percent

# A saving of this share of the exposed transfer is all of it: estimates are no surer.
_ALL = 0.9

_ESTIMATES = {
    "hidden": "the exposed transfer hidden",
    "bucket": "other buckets",
    "buffers": "no broadcast of buffers",
    "half": "half as many exchanges",
    "once": "one exchange for each step of the optimizer",
    "bytes": "half as many bytes",
    "waits": "all of it gone",
}


def check(
    collectives: Frame = needs(collectives),
    replication: Maybe[Frame] = maybe(replication),
    exposed_transfer: Maybe[pd.Series[float]] = maybe(exposed_transfer),
    mean_step_ns: float = needs(mean_step_ns),
    best_plan: Maybe[pd.Series[Any]] = maybe(best_plan),
    own_time: Maybe[Frame] = maybe(own_time),
    transfer_noise: Maybe[float] = maybe(transfer_noise),
    of_step: str = needs(of_step),
    job: Job = needs(JOB),
) -> Estimate:
    if not len(collectives):
        raise NotMeasured(NO_COLLECTIVES) if job.world_size > 1 else DoesNotApply(ONE_RANK)
    if job.world_size < 2 and not replication.lacking:
        raise DoesNotApply("one process, and what it copies between its GPUs is nn.DataParallel's: see data_parallel")
    transfer, step, own = exposed_transfer.get(), mean_step_ns, own_time.get()
    best = best_plan.get()
    gain, exposed = float(best["gain_ns"]), float(transfer.mean())
    lost = gain if best["key"] == "once" else max(gain, exposed)
    known = bool(own["known"].all())
    waiting = own["wait_ns"].max() / step if known else 0.0
    summary = f"{percent(lost / step)} {of_step} is exposed transfer, {percent(waiting)} waits for other ranks"
    if best["key"] == "once":
        loses = "is communication that the optimizer does not need"
    else:
        waited = "" if known else f", or waiting for {'ranks that are not here' if job.missing_ranks else 'late ranks'}"
        most = " at most" if best["at_most"] else ""
        worth = "computation could hide" if best["key"] == "hidden" else f"{_ESTIMATES[best['key']]} would save{most}"
        less = f"; {worth} {percent(gain / step)}" if gain < _ALL * exposed else ""
        loses = f"is communication that nothing hides{waited}{less}"
    sent = min(gain, float(transfer.max()))  # without the copies of what is sent
    return Estimate(
        saving_ns=gain,
        within={"communication": sent},
        by_rank_ns={int(str(r)): ns for r, ns in transfer.items()},
        noise_ns=sent * transfer_noise.get(),
        lost_ns=lost,
        loses=loses,
        summary=summary if waiting else "",
    )


def explain(
    estimate: Estimate,
    own_time: Frame = needs(own_time),
    collectives: Frame = needs(collectives),
    mean_step_ns: float = needs(mean_step_ns),
    step_means: Frame = needs(step_means),
    waits: Maybe[Frame] = maybe(waits),
    exchange_plans: Frame = needs(exchange_plans),
    best_plan: pd.Series[Any] = needs(best_plan),
    activations: str = needs(activations),
    routed: Maybe[Frame] = maybe(routed),
    breakdown: Frame = needs(breakdown),
    call_sites: Maybe[list[Call]] = maybe(call_sites),
    costly_lines: Maybe[Frame] = maybe(costly_lines),
    job: Job = needs(JOB),
) -> Explanation:
    best, worst, step = best_plan, estimate.worst, mean_step_ns
    mine = estimate.rows(collectives)
    per_step = len(mine) / max(estimate.rows(step_means)["traced_steps"].iloc[0], 1)
    waited = float(estimate.rows(own_time)["wait_ns"].iloc[0])
    more = f", {duration(waited)} more waits for other ranks" if waited else ""
    unknown = ""
    if not own_time["known"].all():
        why = "not every rank's trace is here" if job.missing_ranks else waits.why()
        unknown = f" Part of it may be waiting for a late rank: {why or 'not every waiting is known'}."
    accumulates, cap = "once" in set(exchange_plans["key"]), new_bucket(job, best)
    activations = "experts" if activations == "all_to_all" and routed.or_none() is not None else activations
    return Explanation(
        title="Communication is not hidden behind computation",
        summary=f"{count(per_step, 'collective')} a step on rank {worst}; for {duration(estimate.by_rank_ns[worst])} of"
        f" {duration(step)} data is in transfer and nothing is computed{more}.{unknown}",
        changes=advice(job, best, accumulates, activations, mine, per_step),
        evidence=_evidence(breakdown, exchange_plans, step),
        at_most=bool(best["key"] == "hidden" or best["at_most"] or unknown),
        sure=f"Estimated as {_ESTIMATES[best['key']]}{'' if best['key'] == 'waits' else ': ' + best['why']}.{unknown}",
        where=_batch(call_sites.or_none() or ()) if best["key"] == "once" else _by_script(costly_lines, worst, job),
        forecasts=() if cap is None else (Forecast("bucket_cap_mb", str(cap), step - estimate.saving_ns),),
    )


def _batch(calls: Sequence[Call]) -> tuple[Place, ...]:
    """Return where the batches that gradients accumulate of are computed: the forward pass that is called most."""
    forward = max((c for c in calls if c.kind == "forward"), key=lambda call: call.count, default=None)
    return () if forward is None else (Place(forward.file, forward.line, forward.function, what=forward.source),)


def _by_script(lines: Maybe[Frame], rank: int, job: Job) -> tuple[Place, ...]:
    """Return the line in which the script itself exchanges, where nothing wraps its model and most of the time between
    the phases is in one.
    """
    model, line = settings.model(job), costliest(lines, rank, "rest")
    wrapped = model.get("ddp") or model.get("fsdp")
    return (line.place,) if line is not None and line.is_collective and not wrapped else ()


def _evidence(breakdown: Frame, exchange_plans: Frame, step: float) -> Panel:
    exposed = percent(max(part(breakdown, "communication").values()) / step)
    as_it_is = {"change": "as it is", "gain_ns": 0.0, "why": f"{exposed} of it is communication that nothing hides"}
    rows = pd.concat([pd.DataFrame([as_it_is]), exchange_plans])
    rows = rows.assign(then_ns=step - rows["gain_ns"], times=step / (step - rows["gain_ns"]))
    columns = {"change": "change", "then_ns": "predicted step_ns", "times": "speed_times", "why": "because"}
    note = "What another backend would take is not known: none was measured."
    return table("Predicted step by how the ranks exchange", rows, columns, note=note)


RULE = Rule("Communication that nothing hides", check, explain, ("communication", "computation"), notable=NOTABLE_SHARE)
