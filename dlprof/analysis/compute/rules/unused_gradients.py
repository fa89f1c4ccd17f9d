"""The backward pass computes gradients that no optimizer uses.

Where only a part of a model is trained, as a new head on a backbone, its other parameters still have `requires_grad`,
and the backward pass goes through all of them: twice the work of the forward pass, for gradients that are never used.
They are kept as well, and grow from step to step where only the optimizer's own are set to zero.

Where networks are trained against each other, a pass for one often goes through another, whose gradients are set to
None before its own optimizer steps: a critic's update that walks back through the generator.

Needs the facts of the recorder, which compares the models' parameters with those in the optimizers and looks at
gradients before each optimizer's step, and a trace with modules.

Saving: the backward pass of the models, or direct children of a model, of which no parameter is in an optimizer, or
the share of it whose gradients are thrown away; half of that where it goes on to what is before them. That is the most
that it can be: where something before them is trained, a part of it must be.

What to change: `requires_grad_(False)` on them, or their forward pass under `torch.no_grad()`, or `.detach()` of its
result. A network that another one is trained through needs its backward pass, and not the gradients of its parameters.
"""

from __future__ import annotations

from dlprof.analysis.engine import JOB, Frame, Job, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.modules.tree import module_means
from dlprof.analysis.panel import table
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.errors import NotMeasured
from dlprof.units import duration, few

# A pass that goes on to the input computes the gradients of the parameters beside those: about as much.
_OF_PARAMETERS = 0.5

_COLUMNS = {"path": "module", "forward_ns": "forward_ns", "backward_ns": "backward_ns"}


def check(
    module_means: Frame = needs(module_means), mean_step_ns: float = needs(mean_step_ns), job: Job = needs(JOB)
) -> Estimate:
    known = [names for rank in job.ranks if isinstance(names := job.facts[rank].get("untrained"), list)]
    if not known:
        raise NotMeasured("which parameters are in an optimizer was not recorded")
    rows = job.facts[job.ranks[0]].get("dropped") or ()
    through = {str(one["module"]) for one in rows if one.get("through")}
    dropped = {
        str(one["module"]): float(one["dropped"])
        / max(one["passes"], 1)
        * (_OF_PARAMETERS if one.get("through") else 1.0)
        for one in rows
    }
    shares = dropped | dict.fromkeys(set(known[0]).intersection(*known[1:]), 1.0)
    if not shares:
        return nothing("each part of the model has parameters in an optimizer, which uses their gradients")
    mine = module_means[module_means["path"].isin(shares)]
    mine = mine[~mine["path"].duplicated()]
    mine = mine.assign(
        share=mine["path"].map(shares),
        through=mine["path"].isin(through),
        gone_ns=mine["backward_ns"] * mine["path"].map(shares),
    )
    whole = mine["path"].str.startswith("(")
    mine = mine[whole] if whole.any() else mine
    cost = float(mine["gone_ns"].sum())
    cost *= min(mean_step_ns / float(module_means["total_ns"].iloc[0]), 1.0)  # tracing makes steps longer
    return Estimate(
        saving_ns=cost,
        by_rank_ns=dict.fromkeys(job.ranks, cost),
        loses="computes gradients that no optimizer uses",
        seen=mine,
    )


def explain(estimate: Estimate) -> Explanation:
    mine = estimate.seen.sort_values("gone_ns", ascending=False)
    named = few([f"`{path.strip('()')}`" for path in mine["path"]], 4)
    if (mine["share"] < 1).all():
        return _dropped(estimate, mine, named)
    return Explanation(
        title="Gradients are computed that no optimizer uses",
        summary=f"No parameter of {named} is in an optimizer, and all of its gradients are computed:"
        f" {duration(estimate.saving_ns)} of each step.",
        changes=(
            change(
                f"`requires_grad_(False)` on {named} before training; or its forward pass under `torch.no_grad()`,"
                " where nothing before it is trained"
            ),
        ),
        evidence=table("Modules whose gradients nothing uses", mine, _COLUMNS),
        sure="The backward pass of these modules as traced: the most that it can be.",
        at_most=True,
    )


def _dropped(estimate: Estimate, mine: Frame, named: str) -> Explanation:
    changes = []
    for through in mine["through"].drop_duplicates():
        name = few([f"`{path.strip('()')}`" for path in mine.loc[mine["through"] == through, "path"]], 4)
        changes.append(
            change(
                f"`requires_grad_(False)` on {name} while another network is trained through it, and `True` again"
                " before its own update"
                if through
                else f"run {name} under `torch.no_grad()`, or `.detach()` its result, where another network alone is"
                " trained"
            )
        )
    return Explanation(
        title="Gradients are computed and thrown away",
        summary=f"After backward passes for another network the gradients of the parameters of {named} are thrown away"
        f" before their optimizer steps: up to {duration(estimate.saving_ns)} of each step.",
        changes=tuple(changes),
        evidence=table("Modules whose gradients are thrown away", mine, {**_COLUMNS, "share": "thrown away"}),
        sure="The backward pass of these modules as traced, by the share of passes whose gradients are thrown away, and"
        " half of it where the pass goes on to what is before them: the most that it can be.",
        at_most=True,
    )


RULE = Rule("Unused gradients", check, explain, saves_from=("computation", "communication", "host", "launch_latency"))
