"""The stages of a pipeline stand idle while it fills and drains.

A batch is cut into micro-batches that follow each other through the stages. The last stage has nothing to do until the
first micro-batch arrives, and the first stage nothing until its gradients come back. How long, the schedule decides:
GPipe and 1F1B leave (p − 1) ÷ (m + p − 1) of a step idle on each of p ranks, with m micro-batches; v stages a rank make
that (p − 1) ÷ (v·m + p − 1); schedules that split the backward pass fill more, the less its halves differ.

Needs a pipeline of torch.distributed.pipelining on all of its ranks, recorded by dlprof or in traces that tell its
chunks (GPipe's and those of several stages a rank name them, 1F1B's are what lies between its sends and receives): when
each rank was at work on which micro-batch.
The bubble is the idle share of a step, on a GPU in the device's time. The report tells it apart by replaying the step:
what its schedule leaves idle with stages alike, what uneven stages add (see stage_imbalance), launching, handing over.

Saving: the best of the plans that change one line (twice or four times the micro-batches of the same batch; another
schedule for the same stages), each replayed with this run's own chunk times. It takes for granted that computing a
micro-batch of half the size takes half as long; the Python within it, launching and handing over take as long as now.
Small micro-batches use a GPU less well, and more of them wait more often for each other's bad luck: it may be less.

What to change: more micro-batches; a schedule with several stages a rank (Interleaved1F1B) or with split backward
passes (InterleavedZeroBubble, ZBVZeroBubble, DualPipeV); fewer stages, with other kinds of parallelism instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from dlprof.diagnosis import Clear, Rule
from dlprof.engine import Measured
from dlprof.errors import NotMeasured
from dlprof.measures.pipeline import bubbles
from dlprof.measures.pipeline_plans import ASSUMED, pipeline_plans
from dlprof.result import Finding, Forecast, Panel
from dlprof.timeline.steps import mean_step_ns, of_step, step_means
from dlprof.units import duration, percent

# The bubble is called negligible from four micro-batches a rank on (Huang et al., GPipe, 2019): four times as many
# would then, on many ranks, still save 15 % of the step. With fewer, idle time is worth a look from 10 % on (Ascend's
# msprof and TraceLens: from 10 to 15 %).
ENOUGH = 4
NOTABLE_SHARE = 0.15
NOTABLE_OF_FEW = 0.10


def check(run: Measured) -> Finding | Clear:
    """Look at the pipeline that would gain most from one changed line."""
    frame = run.frame(bubbles)
    if (frame["size"] < 2).all():
        return Clear("the pipeline has one rank")
    try:
        plans = run.frame(pipeline_plans)
    except NotMeasured as e:
        idle = f"{percent(float(frame['bubble'].mean()))} of a pipeline's step is idle"
        raise NotMeasured(f"{idle}, but what would fill it is not known: {e}") from None
    calls = frame.groupby("ranks")["calls_a_step"].first()
    easy = plans[plans["easy"]]
    easy = easy.assign(saving=easy["gain_ns"] * easy["ranks"].map(calls)).sort_values("saving", ascending=False)
    if not len(easy):
        bubble = float(frame["bubble"].mean())
        return Clear(f"{percent(bubble)} of a pipeline's step is idle, and no other schedule takes these stages")
    best = easy.to_dict("records")[0]
    worst, plans = frame[frame["ranks"] == best["ranks"]], plans[plans["ranks"] == best["ranks"]]
    bubble = float(worst["bubble"].mean())
    share = float(best["saving"]) / mean_step_ns(run)
    told = worst.to_dict("records")[0]
    if share < (NOTABLE_OF_FEW if told["microbatches"] < ENOUGH * told["size"] else NOTABLE_SHARE):
        return Clear(
            f"{percent(bubble)} of a pipeline's step is idle; {best['change']} would save {percent(max(share, 0.0))}"
            f" {of_step(run)}"
        )
    return Finding(
        title="Pipeline stages stand idle",
        summary=f"{percent(bubble)} of a pipeline's step of {duration(told['step_ns'])} is idle on its {told['size']}"
        f" ranks ({_name(told)}, {told['microbatches']} micro-batches): {_parts(worst)}.",
        verdict=f"{percent(share)} {of_step(run)} is a bubble that {best['change']} would fill.",
        noise_ns=float(worst["noise_ns"].max()) * told["calls_a_step"],
        saving_ns=float(best["saving"]),
        advice=_advice(told, plans, best),
        evidence=_evidence(plans),
        forecasts=_forecasts(mean_step_ns(run), told, plans),
        ranks=tuple(int(r) for r in worst["rank"]),
        sure=f"Replayed with the chunk times of this run; {best['change']} is the best change of one line. It takes for"
        f" granted: {ASSUMED}.",
    )


def _name(told: Mapping[Any, Any]) -> str:
    return str(told["schedule"]).removeprefix("Schedule")


def _parts(ranks: pd.DataFrame) -> str:
    """Tell what the idle time comes from, the mean of the ranks."""
    words = {
        "schedule_ns": "the schedule",
        "imbalance_ns": "uneven stages",
        "communication_ns": "handing over",
        "launch_ns": "launching",
    }
    shares = {word: float((ranks[column] / ranks["step_ns"]).mean()) for column, word in words.items()}
    return ", ".join(f"{percent(share)} by {word}" for word, share in shares.items())


def _advice(told: Mapping[Any, Any], plans: pd.DataFrame, best: Mapping[Any, Any]) -> tuple[str, ...]:
    rest = plans[~plans["even"] & (plans["gain_ns"] > 0) & (plans["change"] != best["change"])]
    # Of what is left, the best that is one line too and of another kind, and the best that is more work.
    other_kind = rest["easy"] & ((rest["schedule"] == told["schedule"]) != (best["schedule"] == told["schedule"]))
    others = [
        chosen.sort_values("step_ns").to_dict("records")[:1] for chosen in (rest[other_kind], rest[~rest["easy"]])
    ]
    return tuple(_how(told, plan) for plan in [best, *(one for few in others for one in few)])


def _how(told: Mapping[Any, Any], plan: Mapping[Any, Any]) -> str:
    then = f"the pipeline's step becomes {duration(plan['step_ns'])}, {percent(plan['bubble'])} of it idle"
    if plan["schedule"] == told["schedule"] and plan["chunks"] == told["chunks"]:
        return f"`n_microbatches={plan['microbatches']}` (is {told['microbatches']}): {then}"
    stages = f" with {plan['chunks']} stages a rank" if plan["chunks"] != told["chunks"] else ""
    return f"`{plan['schedule']}`{stages} (is `{told['schedule']}`): {then}"


def _forecasts(step: float, told: Mapping[Any, Any], plans: pd.DataFrame) -> tuple[Forecast, ...]:
    """Tell the mean step with other micro-batches, and with other schedules, where nothing else is changed."""
    same = plans[(plans["chunks"] == told["chunks"]) & ~plans["even"]]
    found = []
    for setting, other in (("microbatches", "schedule"), ("schedule", "microbatches")):
        alone = same[(same[other] == told[other]) & (same[setting] != told[setting])]
        gains = alone["gain_ns"] * told["calls_a_step"]
        found += [Forecast(setting, str(v), step - float(g)) for v, g in zip(alone[setting], gains, strict=True)]
    return tuple(found)


def _evidence(plans: pd.DataFrame) -> Panel:
    rows = tuple(
        (
            row["change"],
            duration(row["step_ns"]),
            duration(row["gain_ns"]) if abs(row["gain_ns"]) >= 0.0005 * row["step_ns"] else "",
            percent(row["bubble"]),
            "yes" if row["easy"] else "",
        )
        for row in plans.to_dict("records")
    )
    columns = ("", "pipeline's step", "shorter by", "idle", "one line")
    return Panel("table", "What would become of the pipeline's step", rows, columns, note=f"Predicted: {ASSUMED}.")


RULE = Rule(
    "pipeline_bubble",
    "Idle pipeline stages",
    (bubbles, pipeline_plans, step_means),
    check,
    saves_from=("pipeline_bubble", "communication"),
)
