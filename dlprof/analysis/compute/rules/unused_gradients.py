"""The backward pass computes gradients that no optimizer uses.

Where only a part of a model is trained, as adapters in a large model (LoRA), a new head on a backbone or the student of
a teacher, the other parameters still have `requires_grad`, and the backward pass computes their gradients, which are
never used. They are kept as well, and grow from step to step where only the optimizer's own are set to zero.

Where networks are trained against each other, a pass for one often goes through another, whose gradients are set to
None before its own optimizer steps: a critic's update that walks back through the generator.

Needs the facts of the recorder, which compares the models' parameters with those in the optimizers and looks at
gradients before each optimizer's step, and a trace with modules.

Saving: the kernels (on a CPU the operators) that compute, convert and accumulate the gradients of these parameters: of
a Linear's backward pass one of its two products. Of what runs before all that is trained, the whole backward pass, and
a quarter of the host's time in its forward pass, which then records no graph. On a device by a replay of the traced
steps: a step is no shorter than its host allows. Of gradients that are thrown away: the backward pass of their models,
or half of it where it goes on to what is before them; that is the most that it can be.

What to change: `requires_grad_(False)` on them, of a model with adapters before these are added; or their forward pass
under `torch.no_grad()`, or `.detach()` of its result. A network that another one is trained through needs its backward
pass, and not the gradients of its parameters.
"""

from __future__ import annotations

from dlprof.analysis import settings
from dlprof.analysis.compute.cpu_work import cpu_parts, cpu_work, in_all_steps
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, by_rank, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.modules.gradients import idle_gradients
from dlprof.analysis.modules.tree import module_means
from dlprof.analysis.panel import table
from dlprof.analysis.source.line_shares import call_sites
from dlprof.analysis.source.patches import Call
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.result import Place
from dlprof.units import duration, few

# A pass that goes on to the input computes the gradients of the parameters beside those: about as much.
_OF_PARAMETERS = 0.5

_COLUMNS = {"path": "module", "gone_ns": "for gradients that nothing uses_ns"}
_DROPPED = {"path": "module", "forward_ns": "forward_ns", "backward_ns": "backward_ns", "share": "thrown away"}


def check(
    idle_gradients: Frame = needs(idle_gradients),
    module_means: Frame = needs(module_means),
    cpu_parts: Maybe[Frame] = maybe(cpu_parts),
    cpu_work: Maybe[Frame] = maybe(cpu_work),
    mean_step_ns: float = needs(mean_step_ns),
    job: Job = needs(JOB),
) -> Estimate:
    if len(idle_gradients):
        gone = by_rank(idle_gradients.drop_duplicates("rank"), "gain_ns")
        if settings.on_cpu(job):
            gone = in_all_steps(gone, cpu_parts.get(), cpu_work.get())
        loses = "computes gradients that no optimizer uses"
        return Estimate(gone_ns=gone, loses=loses, seen=idle_gradients)
    rows = job.facts[job.ranks[0]].get("dropped") or ()
    if not rows:
        return nothing("each part of the model has parameters in an optimizer, which uses their gradients")
    through = {str(one["module"]) for one in rows if one.get("through")}
    shares = {
        str(one["module"]): float(one["dropped"])
        / max(one["passes"], 1)
        * (_OF_PARAMETERS if one.get("through") else 1.0)
        for one in rows
    }
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
    if not module_means["on_device"].any():  # tracing makes the host's steps longer, and no kernel
        cost *= min(mean_step_ns / float(module_means["total_ns"].iloc[0]), 1.0)
    return Estimate(
        saving_ns=cost,
        by_rank_ns=dict.fromkeys(job.ranks, cost),
        loses="computes gradients that no optimizer uses",
        seen=mine,
    )


def explain(estimate: Estimate, call_sites: Maybe[list[Call]] = maybe(call_sites)) -> Explanation:
    if "share" in estimate.seen:
        return _dropped(estimate)
    mine = estimate.rows(estimate.seen)
    modules = mine.groupby("module", sort=False)["gone_ns"].sum().sort_values(ascending=False).index
    named = few([f"`{path.strip('()')}`" for path in modules], 4)
    parts = not all(path.startswith("(") and path.endswith(")") for path in modules)
    models = {path.strip("()") for path in modules}
    made = [
        one
        for one in call_sites.or_none() or ()
        if (one.kind == "optimizer" if parts else one.kind == "forward" and one.model in models)
    ]
    text = f"`requires_grad_(False)` on {named} before training"
    return Explanation(
        title="Gradients are computed that no optimizer uses",
        summary=f"No parameter of {named} is in an optimizer, and their gradients are computed:"
        f" {duration(estimate.by_rank_ns[estimate.worst])} of each step.",
        changes=(
            change(
                f"{text}; of a model that adapters are added to: `model.requires_grad_(False)` before they are added"
                if parts
                else f"{text}; or its forward pass under `torch.no_grad()`, where nothing before it is trained"
            ),
        ),
        evidence=table("Modules whose gradients nothing uses", mine, _COLUMNS, 12),
        sure="By the traced operators that compute these gradients, half of a Linear's backward pass among them.",
        where=tuple(Place(one.file, one.line, one.function, what=one.source) for one in made[:1]),
    )


def _dropped(estimate: Estimate) -> Explanation:
    mine = estimate.seen.sort_values("gone_ns", ascending=False)
    named = few([f"`{path.strip('()')}`" for path in mine["path"]], 4)
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
        evidence=table("Modules whose gradients are thrown away", mine, _DROPPED),
        sure="The backward pass of these modules as traced, by the share of passes whose gradients are thrown away, and"
        " half of it where the pass goes on to what is before them: the most that it can be.",
        at_most=True,
    )


RULE = Rule("Unused gradients", check, explain, saves_from=("computation", "communication", "host", "launch_latency"))
