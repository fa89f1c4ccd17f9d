"""The gradient scaler skips optimizer steps: the work of these steps is lost.

`torch.amp.GradScaler` multiplies the loss so that small gradients do not underflow in float16. When a gradient becomes
infinite, the optimizer does not step and the scale is halved; after `growth_interval` steps without that, it is
doubled. A well-tuned scaler skips some steps at first, until the scale fits, and then one in a thousand or two.

Needs the step log: dlprof records which steps were skipped without reading from the device, and follows the scale from
that. A fused optimizer on a GPU skips on the device itself; its skipped steps are then not known.

Saving: the share of steady steps that were skipped, without those before the scale first fitted. Steps do not get
shorter: the job needs fewer of them for the same number of optimizer steps.

What to change: a longer `growth_interval` if steps are skipped right after the scale has grown; an `init_scale` near
the scale that it ends up with; bfloat16, which needs no scaler. If steps are skipped at any scale, the gradients are
not finite before scaling: look for the division, the logarithm or the learning rate that causes it.
"""

from __future__ import annotations

import math

import pandas as pd

from dlprof.analysis.engine import Frame, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change
from dlprof.analysis.panel import table
from dlprof.analysis.step.scalers import ON_DEVICE, scalers
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.errors import NotMeasured
from dlprof.result import CATEGORIES, Change
from dlprof.units import count, percent

# As a new GradScaler has it (torch/amp/grad_scaler.py): of a fitting scale, one step in so many is skipped.
_INTERVAL = 2_000

# A scale that skipping halved below this is not the cause of infinite gradients: float16 has numbers up to 65,504.
_TOO_SMALL = 1.0

_COLUMNS = {
    "rank": "rank",
    "skipped": "skipped steps",
    "at_first": "before the scale fitted",
    "steady_skipped": "in steady steps",
    "steady": "steady steps",
    "after_growth": "right after growth",
    "first_scale": "first scale",
    "scale": "last scale",
    "interval": "growth_interval",
}


def check(scalers: Frame = needs(scalers), mean_step_ns: float = needs(mean_step_ns)) -> Estimate:
    if not scalers["known"].any():
        raise NotMeasured(ON_DEVICE)
    known = scalers[scalers["known"]]
    if not (known["steady"] > 0).all():
        raise NotMeasured("no steady training step was recorded")
    share = (known["steady_skipped"] / known["steady"]).clip(upper=1.0).groupby(known["rank"]).max()
    most, n = float(share.max()), float(known["steady"].max())
    total = int(known.groupby("rank")["skipped"].sum().max())
    return Estimate(
        saving_ns=most * mean_step_ns,
        by_rank_ns={int(str(rank)): float(s) * mean_step_ns for rank, s in share.items()},
        noise_ns=math.sqrt(most * (1 - most) / n) * mean_step_ns,
        loses="is lost: the gradient scaler skips optimizer steps",
        summary=f"the gradient scaler skipped {count(total, 'step')} in the whole job",
        seen=known,
    )


def explain(estimate: Estimate) -> Explanation:
    mine = estimate.rows(estimate.seen)
    worst = mine.sort_values("steady_skipped").iloc[-1]
    share = worst["steady_skipped"] / worst["steady"]
    return Explanation(
        title="The gradient scaler skips optimizer steps",
        summary=f"{int(worst['steady_skipped']):,} of {count(int(worst['steady']), 'steady step')} ({percent(share)})"
        f" were skipped because gradients were not finite. The lowest scale was {_scale(worst['least_scale'])};"
        f" the last one is {_scale(worst['scale'])}.",
        changes=_changes(worst),
        evidence=table("Steps that the gradient scaler skipped", estimate.seen, _COLUMNS),
        sure="Counted in every steady step. Steps do not get shorter: fewer of them are needed.",
    )


def _changes(scaler: pd.Series[float]) -> tuple[Change, ...]:
    bfloat = change("bfloat16, which needs no gradient scaler, if the device supports it", numerics=True)
    if scaler["least_scale"] < _TOO_SMALL:
        bad = "gradients are not finite at any scale: find the cause (`torch.autograd.detect_anomaly()`)"
        return (change(bad), bfloat)
    interval = int(scaler["interval"])
    if 0 < interval < _INTERVAL and scaler["after_growth"] >= scaler["steady_skipped"] / 2:
        text = f"`GradScaler(growth_interval={_INTERVAL})` (is {interval}): each time the scale grows, a step is lost"
        return (change(text, numerics=True, growth_interval=(interval, _INTERVAL)), bfloat)
    if math.isnan(scaler["scale"]):
        return (bfloat,)
    fitting = 2.0 ** math.floor(math.log2(max(scaler["scale"], 1.0)))
    text = f"`GradScaler(init_scale={fitting:.0f})`, near the last scale; find out why gradients overflow"
    return (bfloat, change(text, numerics=True))


def _scale(value: float) -> str:
    return "unknown" if math.isnan(value) else f"{value:,.6g}"


RULE = Rule("Skipped optimizer steps", check, explain, CATEGORIES)
