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

from dlprof.analysis.engine import Maybe
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.pipeline.pipeline_plans import ASSUMED
from dlprof.errors import NotMeasured
from dlprof.result import Change, Forecast, Panel
from dlprof.units import duration, percent

# The bubble is called negligible from four micro-batches a rank on (Huang et al., GPipe, 2019): four times as many
# would then, on many ranks, still save 15 % of the step. With fewer, idle time is worth a look from 10 % on (Ascend's
# msprof and TraceLens: from 10 to 15 %).
ENOUGH = 4
NOTABLE_SHARE = 0.15
NOTABLE_OF_FEW = 0.10


def check(
    bubbles: pd.DataFrame, pipeline_plans: Maybe[pd.DataFrame], mean_step_ns: Maybe[float], of_step: Maybe[str]
) -> Estimate:
    """Estimate what one changed line saves of the pipeline that gains most from it."""
    frame = bubbles
    if (frame["size"] < 2).all():
        return nothing("the pipeline has one rank")
    idle = f"{percent(float(frame['bubble'].mean()))} of a pipeline's step is idle"
    try:
        plans = pipeline_plans.get()
    except NotMeasured as e:
        raise NotMeasured(f"{idle}, but what would fill it is not known: {e}") from None
    easy = plans[plans["easy"]]
    if not len(easy):
        return nothing(f"{idle}, and no other schedule takes these stages")
    calls = easy["ranks"].map(frame.groupby("ranks")["calls_a_step"].first())
    best = easy.assign(saving=easy["gain_ns"] * calls).sort_values("saving").to_dict("records")[-1]
    gain = max(float(best["saving"]), 0.0)
    mine, plans = (of[of["ranks"] == best["ranks"]] for of in (frame, plans))
    told = mine.to_dict("records")[0]
    idle = f"{percent(float(mine['bubble'].mean()))} of a pipeline's step is idle"
    return Estimate(
        saving_ns=gain,
        by_rank_ns={int(r): gain for r in mine["rank"]},
        noise_ns=float(mine["noise_ns"].max()) * told["calls_a_step"],
        notable=NOTABLE_OF_FEW if told["microbatches"] < ENOUGH * told["size"] else None,
        loses=f"is a bubble that {best['change']} would fill",
        summary=f"{idle}; {best['change']} would save {percent(gain / mean_step_ns.get())} {of_step.get()}",
        explain=lambda: _explain(mean_step_ns.get(), mine, plans, best),
    )


def _explain(step: float, mine: pd.DataFrame, plans: pd.DataFrame, best: Mapping[Any, Any]) -> Explanation:
    told = mine.to_dict("records")[0]
    return Explanation(
        title="Pipeline stages stand idle",
        summary=f"{percent(float(mine['bubble'].mean()))} of a pipeline's step of {duration(told['step_ns'])} is idle"
        f" on its {told['size']} ranks ({_name(told)}, {told['microbatches']} micro-batches): {_parts(mine)}.",
        changes=_changes(told, plans, best),
        evidence=_evidence(plans),
        forecasts=_forecasts(step, told, plans),
        sure=f"Replayed with the chunk times of this run; {best['change']} is the best change of one line. It takes for"
        f" granted: {ASSUMED}.",
    )


def _name(told: Mapping[Any, Any]) -> str:
    return str(told["schedule"]).removeprefix("Schedule")


def _parts(ranks: pd.DataFrame) -> str:
    """Return what the idle time comes from, the mean of the ranks."""
    words = {
        "schedule_ns": "the schedule",
        "imbalance_ns": "uneven stages",
        "communication_ns": "handing over",
        "launch_ns": "launching",
    }
    shares = {word: float((ranks[column] / ranks["step_ns"]).mean()) for column, word in words.items()}
    return ", ".join(f"{percent(share)} by {word}" for word, share in shares.items())


def _changes(told: Mapping[Any, Any], plans: pd.DataFrame, best: Mapping[Any, Any]) -> tuple[Change, ...]:
    rest = plans[~plans["even"] & (plans["gain_ns"] > 0) & (plans["change"] != best["change"])]
    # Of what is left, the best that is one line too and of another kind, and the best that is more work.
    other_kind = rest["easy"] & ((rest["schedule"] == told["schedule"]) != (best["schedule"] == told["schedule"]))
    others = [
        chosen.sort_values("step_ns").to_dict("records")[:1] for chosen in (rest[other_kind], rest[~rest["easy"]])
    ]
    return tuple(_change(told, plan) for plan in [best, *(one for few in others for one in few)])


def _change(told: Mapping[Any, Any], plan: Mapping[Any, Any]) -> Change:
    """Return a plan as a change of settings, under the names of the run's facts and of `_forecasts`."""
    then = f"the pipeline's step becomes {duration(plan['step_ns'])}, {percent(plan['bubble'])} of it idle"
    if plan["schedule"] == told["schedule"] and plan["chunks"] == told["chunks"]:
        now, to = int(told["microbatches"]), int(plan["microbatches"])
        return change(f"`n_microbatches={to}` (is {now}): {then}", microbatches=(now, to))
    stages = f" with {plan['chunks']} stages a rank" if plan["chunks"] != told["chunks"] else ""
    text = f"`{plan['schedule']}`{stages} (is `{told['schedule']}`): {then}"
    return change(text, schedule=(told["schedule"], plan["schedule"]))


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
        (row["change"], row["step_ns"], round(row["gain_ns"]), row["bubble"], row["easy"])
        for row in plans.to_dict("records")
    )
    columns = ("", "pipeline's step_ns", "shorter by_ns", "idle_share", "one line")
    return Panel("table", "What would become of the pipeline's step", rows, columns, note=f"Predicted: {ASSUMED}.")


RULE = Rule(
    "pipeline_bubble",
    "Idle pipeline stages",
    check,
    saves_from=("pipeline_bubble", "communication"),
    notable=NOTABLE_SHARE,
)
