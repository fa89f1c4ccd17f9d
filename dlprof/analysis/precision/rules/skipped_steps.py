"""The gradient scaler skips steps of the optimizer: what they computed is thrown away.

`torch.amp.GradScaler` multiplies the loss, so that small gradients do not become 0 in float16. Where that makes one of
them infinite, the optimizer does not step and the scale is halved; after `growth_interval` steps without, it is
doubled. A well-set scaler skips some steps at first, until its scale fits, and one in a thousand or two from then on.

Needs the step log with what scalers did: dlprof records which steps were skipped without asking the device, and follows
the scale from that. A fused optimizer on a GPU skips on the device itself; what it skips is then not known.

Saving: the share of steady steps that were skipped, those left out before the scale first fitted. Steps do not become
shorter: fewer of them are needed for as many of the optimizer's.

What to change: a longer `growth_interval` where steps are skipped after the scale has grown; an `init_scale` near the
one that it finds; bfloat16, which needs no scaler. Where steps are skipped whatever the scale, gradients are not finite
before it: look for the division, the logarithm or the learning rate that makes them so.
"""

from __future__ import annotations

import math

import pandas as pd

from dlprof.analysis.engine import Frame
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change
from dlprof.analysis.panel import table
from dlprof.analysis.precision.scalers import ON_DEVICE
from dlprof.errors import NotMeasured
from dlprof.result import CATEGORIES, Change
from dlprof.units import count, percent

# As a new GradScaler has it (torch/amp/grad_scaler.py): of a fitting scale, one step in so many is skipped.
_INTERVAL = 2_000

# Halved below this by skipping alone, the scale is not what makes gradients infinite: float16 has numbers up to 65,504.
_TOO_SMALL = 1.0

_COLUMNS = {
    "rank": "rank",
    "skipped": "skipped steps",
    "at_first": "of these at first",
    "steady_skipped": "in steady steps",
    "steady": "of",
    "after_growth": "right after growing",
    "first_scale": "first scale",
    "scale": "last scale",
    "interval": "growth_interval",
}


def check(scalers: Frame, mean_step_ns: float) -> Estimate:
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
        loses="is thrown away: the gradient scaler skips steps of the optimizer",
        summary=f"the gradient scaler skipped {count(total, 'step')} in all",
        seen=known,
    )


def explain(estimate: Estimate) -> Explanation:
    mine = estimate.rows(estimate.seen)
    worst = mine.sort_values("steady_skipped").iloc[-1]
    share = worst["steady_skipped"] / worst["steady"]
    return Explanation(
        title="The gradient scaler skips steps",
        summary=f"{count(int(worst['steady_skipped']), 'step')} of {int(worst['steady']):,} steady ones"
        f" ({percent(share)}) did nothing, for gradients were not finite. The scale was at least"
        f" {_scale(worst['least_scale'])} and is {_scale(worst['scale'])} now.",
        changes=_changes(worst),
        evidence=table("Steps that the gradient scaler skipped", estimate.seen, _COLUMNS),
        sure="Counted in every steady step. The steps themselves do not become shorter: fewer are needed.",
    )


def _changes(scaler: pd.Series[float]) -> tuple[Change, ...]:
    bfloat = change("bfloat16, which needs no gradient scaler, where the device has it", numerics=True)
    if scaler["least_scale"] < _TOO_SMALL:
        bad = "gradients are not finite whatever the scale: find what makes them so (`torch.autograd.detect_anomaly()`)"
        return (change(bad), bfloat)
    interval = int(scaler["interval"])
    if 0 < interval < _INTERVAL and scaler["after_growth"] >= scaler["steady_skipped"] / 2:
        text = (
            f"`GradScaler(growth_interval={_INTERVAL})` (is {interval}): each time that the scale grows, a step is lost"
        )
        return (change(text, numerics=True, growth_interval=(interval, _INTERVAL)), bfloat)
    if math.isnan(scaler["scale"]):
        return (bfloat,)
    fitting = 2.0 ** math.floor(math.log2(max(scaler["scale"], 1.0)))
    text = (
        f"`GradScaler(init_scale={fitting:.0f})`, near the scale that it finds; find what makes gradients this uneven"
    )
    return (bfloat, change(text, numerics=True))


def _scale(value: float) -> str:
    return "not known" if math.isnan(value) else f"{value:,.6g}"


RULE = Rule("Skipped optimizer steps", check, explain, CATEGORIES, of_training=True)
