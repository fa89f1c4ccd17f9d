"""torch.compile compiles again and again while training.

Dynamo compiles a function for what it has seen: shapes, dtypes, numbers, flags. A call that differs is compiled anew,
while training stands still; from `torch._dynamo.config.recompile_limit` times on the function runs uncompiled. What is
compiled in the first steps is the price of compiling, and not counted here.

Needs the stalls that dlprof records with the step log: what Dynamo says it spent on each compilation, and why a
function was compiled anew, taken from its own record after every step. On a GPU also a trace: compilations count up
to the step's time without device work.

Saving: what the steady steps spent compiling, gone altogether. Where a function was compiled so often in the first
steps that Dynamo gave up, it is run uncompiled in all others: what Python costs there is then the most that is saved.
Where the compilations until then took longer than that in all steps together, they count as well, as a part of the run.

What to change: give every step the same shapes (pad, drop the last batch), or say which sizes vary
(`torch.compile(dynamic=True)`, `torch._dynamo.mark_dynamic`); pass numbers that change as tensors; keep flags and
closures the same. `TORCH_LOGS=recompiles` prints every reason in full.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, by_rank, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change
from dlprof.analysis.host.gaps import HOST
from dlprof.analysis.host.parts import HeldUp, held_up
from dlprof.analysis.panel import table
from dlprof.analysis.step.breakdown import breakdown, most_saved_ns, part
from dlprof.analysis.step.savings import stall_savings
from dlprof.analysis.step.whole_job import training_steps
from dlprof.analysis.timeline.stalls import compilations, stall_means, stalls_of
from dlprof.errors import NotMeasured
from dlprof.result import Change
from dlprof.units import count, duration, short

MOST_ROWS = 12

_KIND = "compilation"
# torch._dynamo.config.recompile_limit, unless somebody has set it.
_LIMIT = 8
_GIVEN_UP = {"path": "function", "reason": "compiled because", "count": "times", "ns": "together_ns"}
_COLUMNS = {"path": "function", "reason": "compiled because", "steady": "times", "steady_ns": "together_ns"}


def check(
    stall_means: Frame = needs(stall_means),
    compilations: Frame = needs(compilations),
    breakdown: Frame = needs(breakdown),
    stall_savings: Mapping[str, float] = needs(stall_savings),
    held_up: Maybe[HeldUp] = maybe(held_up),
    training_steps: Maybe[pd.Series[float]] = maybe(training_steps),
    job: Job = needs(JOB),
) -> Estimate:
    late, up = held_up.or_none(), compilations[_given_up(compilations)]
    if len(up) and late is not None and not compilations["steady"].any():
        again, trained = by_rank(up, "ns"), training_steps.or_none()
        steps = math.inf if trained is None else float(trained.mean())
        # In a short job compiling so often takes longer than what Python costs afterwards.
        if max(again.values()) > late.gain_ns * steps:
            gone = {rank: late.by_rank_ns.get(rank, 0.0) + ns / steps for rank, ns in again.items()}
            loses = "is spent compiling again, until torch.compile gave up"
            return Estimate(saving_ns=max(gone.values()), by_rank_ns=gone, scope="run", loses=loses, seen=up)
        gone = {rank: ns for rank, ns in late.by_rank_ns.items() if rank in again}
        return Estimate(
            saving_ns=late.gain_ns, by_rank_ns=gone, loses="is Python that torch.compile gave up on", seen=up
        )
    if not len(compilations) and settings.model(job).get("compiled"):
        raise NotMeasured("the model is compiled, but this version of torch does not tell when")
    saving = min(stall_savings[_KIND], most_saved_ns(breakdown, (_KIND,)))
    return Estimate(
        saving_ns=saving,
        within={_KIND: saving},
        by_rank_ns=part(breakdown, _KIND),
        noise_of=(_KIND,),
        loses="is spent recompiling",
        summary="" if stall_means["stalls"][stall_means["kind"] == _KIND].any() else "no steady step compiled anything",
    )


def explain(
    estimate: Estimate,
    stall_means: Frame = needs(stall_means),
    compilations: Frame = needs(compilations),
    job: Job = needs(JOB),
) -> Explanation:
    rank = estimate.worst
    if estimate.seen is not None:
        return _uncompiled(estimate)
    (mine,) = stalls_of(stall_means, _KIND, rank).to_dict("records")
    found = estimate.rows(compilations[compilations["steady"] > 0])
    found = found.sort_values("steady_ns", ascending=False).astype({"steady_ns": float})
    reasons = [r for r in found["reason"] if r not in ("", "unknown")]
    shown = found.assign(
        path=[("…" + path[-59:] if len(path) > 60 else path) or "unknown" for path in found["path"]],
        reason=[short(reason, 160) or "first time" for reason in found["reason"]],
    )
    return Explanation(
        title="torch.compile compiles again and again",
        summary=f"{count(int(mine['stalls']), 'compilation')} in {int(mine['steps']):,} steady steps of rank {rank};"
        f" the longest took {duration(float(mine['longest_ns']))}"
        f"{f' (reason: {short(reasons[0], 120)})' if reasons else ''}.",
        changes=_changes(found, settings.training_loader(job, rank).get("drop_last")),
        evidence=table(f"Compilations in the steady steps of rank {rank}", shown, _COLUMNS, MOST_ROWS),
        at_most=True,
        sure="Measured in every steady step, as Dynamo reports it; estimated as all of it gone.",
    )


def _given_up(compilations: Frame) -> pd.Series[bool]:
    """Return which functions were compiled anew as often as Dynamo does before it gives up."""
    known = ~compilations["reason"].isin(("", "unknown"))
    times = compilations["count"].where(known, 0).groupby([compilations["rank"], compilations["path"]]).transform("sum")
    return known & (times >= _LIMIT - 1)


def _uncompiled(estimate: Estimate) -> Explanation:
    mine = estimate.rows(estimate.seen)
    first = mine.iloc[0]
    times = int(mine.loc[mine["path"] == first["path"], "count"].sum()) + 1
    function, reason = (
        short(str(first["path"]).rpartition("/")[2], 60),
        short(" ".join(str(first["reason"]).split()), 120),
    )
    return Explanation(
        title="torch.compile gave up, and the function runs uncompiled",
        summary=f"`{function}` was compiled {count(times, 'time')} in the first steps, as what it"
        f" sees changes ({reason}); from then on rank {estimate.worst} runs it uncompiled.",
        changes=_changes(mine, None),
        evidence=table(f"Compilations in the first steps of rank {estimate.worst}", mine, _GIVEN_UP, MOST_ROWS),
        at_most=True,
        sure="The reasons are Dynamo's own. What compiling would save is not known: it is no more than the Python of"
        " the step.",
    )


def _changes(found: Frame, drops: bool | None) -> tuple[Change, ...]:
    printed = change("`TORCH_LOGS=recompiles` prints every reason in full", TORCH_LOGS=(None, "recompiles"))
    if not found["reason"].str.contains("size mismatch|stride mismatch", regex=True).any():
        guards = [reason.partition(" == ")[0] for reason in found["reason"] if " == " in reason]
        if any("['lr']" in guard for guard in guards):
            same = "pass the learning rate as a tensor, which is changed in place: `lr=torch.tensor(0.1)`"
        else:
            named = f"`{short(guards[0], 60)}`" if guards else "what the reasons in the report name"
            same = f"keep {named} the same at every call, or pass it as a tensor"
        return change(same), printed
    shapes = "give every step the same shapes: pad to few lengths"
    padded = change(f"{shapes}, `drop_last=True`", numerics=True, drop_last=(drops, True))
    return (
        change(shapes, numerics=True) if drops else padded,
        change("or `torch.compile(..., dynamic=True)`, which compiles once for all sizes", dynamic=(None, True)),
        printed,
    )


RULE = Rule(
    "Compiling again and again", check, explain, saves_from=(_KIND, *HOST, "computation", "other"), of_host=True
)
