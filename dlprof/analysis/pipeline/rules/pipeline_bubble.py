"""The stages of a pipeline stand idle while it fills and drains.

A batch is cut into micro-batches that follow each other through the stages. The last stage has nothing to do until the
first micro-batch arrives, and the first stage nothing until its gradients come back. How long depends on the schedule:
GPipe and 1F1B leave (p − 1) ÷ (m + p − 1) of a step idle on each of p ranks, with m micro-batches; v stages a rank make
that (p − 1) ÷ (v·m + p − 1); schedules that split the backward pass fill more, the less its halves differ.

Needs a pipeline of torch.distributed.pipelining on all of its ranks, recorded by dlprof or in traces that show when
each rank worked on which micro-batch. The bubble is the idle share of a step, on a GPU in the device's time. Replaying
the step divides it into what the schedule leaves idle with stages alike, what uneven stages add (see stage_imbalance),
launching, and handing over.

Saving: the best plan that changes one line (two or four times the micro-batches of the same batch; another schedule for
the same stages), replayed with this run's own chunk times. Half a micro-batch is computed in half the time; the Python
within it, launching and handing over take as long as now. It may be less: small micro-batches use a GPU less well.

What to change: more micro-batches; a schedule with several stages a rank (Interleaved1F1B) or with split backward
passes (InterleavedZeroBubble, ZBVZeroBubble, DualPipeV); fewer stages, with other kinds of parallelism instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from dlprof.analysis.engine import Frame, Maybe, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.panel import table
from dlprof.analysis.pipeline.pipeline_plans import ASSUMED, pipeline_plans
from dlprof.analysis.pipeline.pipes import bubbles
from dlprof.analysis.pipeline.schedules import short
from dlprof.analysis.timeline.steps import mean_step_ns, of_step
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.result import Change, Forecast
from dlprof.units import duration, percent

# The bubble is called negligible from four micro-batches a rank on (Huang et al., GPipe, 2019): four times as many
# would then, on many ranks, still save 15 % of the step. With fewer, idle time is worth a look from 10 % on (Ascend's
# msprof and TraceLens: from 10 to 15 %).
ENOUGH = 4
NOTABLE_SHARE = 0.15
NOTABLE_OF_FEW = 0.10

_CAUSES = ("schedule_ns", "imbalance_ns", "communication_ns", "launch_ns")
_PLANS = {"change": "", "step_ns": "pipeline's step_ns", "gain_ns": "shorter by_ns", "bubble": "idle_share"}


def check(
    bubbles: Frame = needs(bubbles),
    pipeline_plans: Maybe[Frame] = maybe(pipeline_plans),
    mean_step_ns: Maybe[float] = maybe(mean_step_ns),
    of_step: Maybe[str] = maybe(of_step),
) -> Estimate:
    if (bubbles["size"] < 2).all():
        raise DoesNotApply("the pipeline has one rank")
    idle = _idle(bubbles)
    try:
        plans = pipeline_plans.get()
    except NotMeasured as e:
        raise NotMeasured(f"{idle} is idle, but what would fill it is not known: {e}") from None
    easy = plans[plans["easy"]]
    if not len(easy):
        return nothing(f"{idle} is idle, and no other schedule takes these stages")
    calls = easy["ranks"].map(bubbles.groupby("ranks")["calls_a_step"].first())
    # Take the middle one of several pipelines: if only one idles, the reason is another.
    each = easy.assign(saving=easy["gain_ns"] * calls).sort_values("saving", kind="stable")
    each = each.drop_duplicates("ranks", keep="last")
    best = each.to_dict("records")[(len(each) - 1) // 2]
    ranks, plans = (frame[frame["ranks"] == best["ranks"]] for frame in (bubbles, plans))
    pipe = ranks.to_dict("records")[0]
    alike = bubbles[(bubbles["schedule"] == pipe["schedule"]) & (bubbles["size"] == pipe["size"])]
    gain = max(best["saving"], 0.0)
    return Estimate(
        saving_ns=gain,
        by_rank_ns=dict.fromkeys(alike["rank"].tolist(), gain),
        noise_ns=float(ranks["noise_ns"].max()) * pipe["calls_a_step"],
        notable=NOTABLE_OF_FEW if pipe["microbatches"] < ENOUGH * pipe["size"] else None,
        loses=f"is a bubble that {best['change']} would fill",
        summary=f"{_idle(ranks)} is idle;"
        f" {best['change']} would save {percent(gain / mean_step_ns.get())} {of_step.get()}",
        seen=(ranks, plans, best),
    )


def explain(estimate: Estimate, mean_step_ns: float = needs(mean_step_ns)) -> Explanation:
    ranks, plans, best = estimate.seen
    pipe = ranks.to_dict("records")[0]
    schedule, uneven, handing_over, launching = map(percent, ranks[[*_CAUSES]].div(ranks["step_ns"], axis=0).mean())
    # Add the best other plan of another kind that is also one line, and the best one that is more work.
    rest = plans[~plans["even"] & (plans["gain_ns"] > 0) & (plans["change"] != best["change"])].sort_values("step_ns")
    other_kind = (rest["schedule"] == pipe["schedule"]) != (best["schedule"] == pipe["schedule"])
    others = pd.concat([rest[rest["easy"] & other_kind].head(1), rest[~rest["easy"]].head(1)])
    shown, note = plans.assign(gain_ns=plans["gain_ns"].round()), f"Predicted: {ASSUMED}."
    return Explanation(
        title="Pipeline stages stand idle",
        summary=f"{_idle(ranks)} of {duration(pipe['step_ns'])} is idle on its {pipe['size']} ranks"
        f" ({short(pipe['schedule'])}, {pipe['microbatches']} micro-batches): {schedule} by the schedule, {uneven} by"
        f" uneven stages, {handing_over} by handing over, {launching} by launching.",
        changes=tuple(_change(pipe, plan) for plan in [best, *others.to_dict("records")]),
        evidence=table("What would become of the pipeline's step", shown, _PLANS | {"easy": "one line"}, note=note),
        forecasts=_forecasts(mean_step_ns, pipe, plans),
        sure=f"Replayed with the chunk times of this run; {best['change']} is the best change of one line. It assumes"
        f" that {ASSUMED}.",
    )


def _idle(bubbles: Frame) -> str:
    return f"{percent(bubbles['bubble'].mean())} of a pipeline's step"


def _change(pipe: Mapping[Any, Any], plan: Mapping[Any, Any]) -> Change:
    """Return a plan as a change of settings, under the names of the run's facts and of `_forecasts`."""
    then = f"the pipeline's step becomes {duration(plan['step_ns'])}, {percent(plan['bubble'])} of it idle"
    if plan["schedule"] == pipe["schedule"] and plan["chunks"] == pipe["chunks"]:
        now, to = pipe["microbatches"], plan["microbatches"]
        return change(f"`n_microbatches={to}` (is {now}): {then}", microbatches=(now, to))
    stages = f" with {plan['chunks']} stages a rank" if plan["chunks"] != pipe["chunks"] else ""
    text = f"`{plan['schedule']}`{stages} (is `{pipe['schedule']}`): {then}"
    return change(text, schedule=(pipe["schedule"], plan["schedule"]))


def _forecasts(step_ns: float, pipe: Mapping[Any, Any], plans: Frame) -> tuple[Forecast, ...]:
    """Predict the mean step with other micro-batches, and with other schedules, where nothing else is changed."""
    same = plans[(plans["chunks"] == pipe["chunks"]) & ~plans["even"]]
    found = []
    for setting, other in (("microbatches", "schedule"), ("schedule", "microbatches")):
        alone = same[(same[other] == pipe[other]) & (same[setting] != pipe[setting])]
        steps = step_ns - alone["gain_ns"] * pipe["calls_a_step"]
        found += [Forecast(setting, str(v), float(ns)) for v, ns in zip(alone[setting], steps, strict=True)]
    return tuple(found)


_SAVES_FROM = ("pipeline_bubble", "communication")
RULE = Rule("Idle pipeline stages", check, explain, _SAVES_FROM, notable=NOTABLE_SHARE)
