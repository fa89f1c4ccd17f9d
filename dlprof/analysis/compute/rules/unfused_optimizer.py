"""The optimizer goes through its parameters one by one, or through all of them once for each of its formula's terms.

Adam's formula is a dozen elementwise operators. Taken one parameter at a time (`foreach=False`, the default on a CPU)
that is a dozen calls a parameter; taken for all parameters at once (`foreach=True`, the default on a GPU) it still is a
dozen passes through memory. `fused=True` reads each value once and writes it once, in one kernel for many parameters.

Both go through one group of parameters after the other. Where each parameter is a group of its own, as recipes with a
learning rate for each layer make them, every call is for one tensor again, and the step, `zero_grad` and the scheduler
do for each group what they need do once for all that have the same settings.

Needs the settings that dlprof records of the optimizer, and its time: on a CPU from every steady step, on a GPU from
the kernels that it launched and the idle time that launching them left.

Saving: the optimizer's time but for what a fused one takes. On a CPU that share was measured, over models of 8 to 200
parameter tensors. On a GPU the traced steps are replayed with what a fused one takes the host, as measured on one H200,
and with kernels that take as long as their bytes do. With many groups of the same settings, of an optimizer that is
fused or goes through lists: at most the share of its time that the groups have which need not be.

What to change: `fused=True`; one group for each set of settings. A class without it is not judged; under
`torch.compile` its step can be compiled too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dlprof.analysis import settings
from dlprof.analysis.compute.optimizer import FUSED_LEFT, optimizer_work
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, by_rank, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.source.statements import Trees, groups_made, statements
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.result import Panel
from dlprof.units import current, duration, percent


def check(optimizer_work: Maybe[Frame] = maybe(optimizer_work), job: Job = needs(JOB)) -> Estimate:
    optimizer = settings.optimizer(job)
    if not optimizer:
        if any("optimizers" in facts for facts in job.facts.values()):
            raise DoesNotApply("the job has no optimizer of torch.optim")
        raise NotMeasured("the optimizer's settings were not recorded (record with `dlprof wrap`)")
    name = str(optimizer.get("class"))
    if (more := _needless_groups(optimizer)) and _takes_lists(optimizer, job):
        took = by_rank(optimizer_work.get(), "ns")
        return Estimate(
            gone_ns={rank: ns * more / optimizer["parameter_groups"] for rank, ns in took.items()},
            noise_ns=float(optimizer_work.get()["noise_ns"].max()),
            loses="goes to groups of parameters that could be one",
            summary=f"{name} has {optimizer['parameter_groups']:,} groups",
        )
    if optimizer.get("fused"):
        return nothing(f"{name} is fused")
    if not settings.takes_fused(optimizer):
        raise DoesNotApply(f"PyTorch has no fused {name}")
    if name not in FUSED_LEFT:
        raise NotMeasured(
            f"what a fused {name} saves is not known: `dlprof try --set optimizer.fused=True` measures it"
        )
    frame = optimizer_work.get()
    left = FUSED_LEFT[name][0 if settings.on_cpu(job) else 1]
    by_share = (frame["ns"] - frame["idle_ns"]) * (1 - left) + frame["idle_ns"]
    return Estimate(
        gone_ns=by_rank(frame.assign(gone_ns=frame["fused_gain_ns"].fillna(by_share)), "gone_ns"),
        noise_ns=float(frame["noise_ns"].max()),
        loses=f"would be saved by a fused {name}",
        seen=left,
    )


# So many groups of parameters are no list of learning rates, where this share of them could be put into others.
_MANY, _NEEDLESS = 16, 0.5


def _needless_groups(optimizer: Mapping[str, Any]) -> int:
    """Return how many groups have the settings of another one, 0 where these are few."""
    groups, distinct = int(optimizer.get("parameter_groups") or 0), int(optimizer.get("distinct_groups") or 0)
    return groups - distinct if distinct and groups >= _MANY and groups - distinct >= _NEEDLESS * groups else 0


def _takes_lists(optimizer: Mapping[str, Any], job: Job) -> bool:
    """Return whether an optimizer updates a whole group at once: fused, or by lists, as it does on a GPU by itself."""
    foreach = optimizer.get("foreach")
    return bool(optimizer.get("fused") or foreach or (foreach is None and not settings.on_cpu(job)))


def explain(
    estimate: Estimate,
    optimizer_work: Frame = needs(optimizer_work),
    trees: Trees = needs(statements),
    job: Job = needs(JOB),
) -> Explanation:
    optimizer, on_cpu, rank = settings.optimizer(job), settings.on_cpu(job), estimate.worst
    name, fused, foreach, parameters = (optimizer.get(key) for key in ("class", "fused", "foreach", "parameters"))
    took, calls = map(float, estimate.rows(optimizer_work)[["ns", "calls"]].iloc[0])
    many = "" if math.isnan(calls) else f", in {calls:,.0f} {'operators' if on_cpu else 'kernels'}"
    of = f" for {parameters:,} parameter tensors" if parameters else ""
    now = "one after the other" if foreach is False or (on_cpu and not foreach) else "in passes"
    call = f"`{name}(..., fused=True)` (is {current(fused)}; foreach is {current(foreach)})"
    groups, where = "", groups_made(trees, str(name))
    more = _needless_groups(optimizer)
    if more:
        number = optimizer["parameter_groups"]
        groups = (
            "one group for all parameters with the same settings, as by a dictionary with the key `(lr, weight_decay)`:"
            f" {number - more:,} {'group' if number - more == 1 else 'groups'} in place of {number:,}"
        )
        call = f"{groups}; and {call}"
    if more and _takes_lists(optimizer, job):
        return Explanation(
            title="The optimizer has many groups of parameters with the same settings",
            summary=f"{name} takes {duration(took)} of each step{of}{many}; it goes through {number:,} groups, of which"
            f" {more:,} have the settings of another one.",
            changes=(change(groups),),
            at_most=True,
            sure="At most: as if the optimizer's time were the groups' alone.",
            where=where,
        )
    parts = (("now", took), ("fused, as predicted", max(took - estimate.by_rank_ns[rank], 0.0)))
    return Explanation(
        title="The optimizer is not fused",
        summary=f"{name} takes {duration(took)} of each step{of}{many}; it goes through them {now}.",
        changes=(change(call, fused=(fused, True)),),
        evidence=Panel("bars", f"The optimizer's part of a step on rank {rank}", parts, unit="ns"),
        sure=f"A fused {name} is taken to need {percent(estimate.seen)} of this one's time, as measured on a CPU."
        if on_cpu
        else f"Estimated by replaying the traced steps with the host's time of a fused {name}, as measured on an H200,"
        " and kernels that take as long as their bytes do.",
        where=where if more else (),
    )


_SAVES_FROM = ("computation", "optimizer_host", "host", "other")
RULE = Rule("Unfused optimizer", check, explain, _SAVES_FROM, of_host=True)
