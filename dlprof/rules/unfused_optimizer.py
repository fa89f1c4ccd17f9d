"""The optimizer goes through its parameters one by one, or through all of them once for each of its formula's terms.

Adam's formula is a dozen elementwise operators. Taken one parameter at a time (`foreach=False`, the default on a CPU)
that is a dozen calls a parameter; taken for all parameters at once (`foreach=True`, the default on a GPU) it still is a
dozen passes through memory. `fused=True` reads each value once and writes it once, in one kernel for many parameters.

Needs the settings that dlprof records of the optimizer, and its time: on a CPU from every steady step, on a GPU from
the kernels that it launched and the idle time that launching them left.

Saving: the optimizer's time but for what a fused one takes. On a CPU that share was measured, over models of 8 to 200
parameter tensors; on a GPU it is the share of the memory traffic, and the steps are replayed with so much less of the
optimizer's kernels and launches.

What to change: `fused=True`. Where a class has no fused kernel: `foreach=True`. Under `torch.compile` the optimizer's
step can be compiled too.
"""

from __future__ import annotations

import math

from dlprof.diagnosis import Clear, Rule
from dlprof.engine import Measured, by_rank
from dlprof.errors import NotMeasured
from dlprof.measures import settings
from dlprof.measures.optimizer import FUSED_LEFT, optimizer_work
from dlprof.measures.replay import own_time, saving
from dlprof.result import Finding, Panel
from dlprof.timeline.steps import mean_step_ns, of_step, step_means
from dlprof.units import duration, percent

# One keyword, so worth saying from where any finding is (diagnosis.LEAST_SHARE).
NOTABLE_SHARE = 0.02


def check(run: Measured) -> Finding | Clear:
    """Look at the optimizer with most parameters, and at what a fused one would take."""
    told = settings.optimizer(run)
    if not told:
        raise NotMeasured("the optimizer's settings were not recorded")
    name = str(told.get("class"))
    if told.get("fused"):
        return Clear(f"{name} is fused")
    if name not in FUSED_LEFT:
        raise NotMeasured(f"no fused {name} is known")
    frame = run.frame(optimizer_work)
    on_cpu = settings.on_cpu(run)
    left = FUSED_LEFT[name][0 if on_cpu else 1]
    took, idle = by_rank(frame, "ns"), by_rank(frame, "idle_ns")
    less = {r: (ns - idle[r]) * (1 - left) + idle[r] for r, ns in took.items()}
    gone = less | by_rank(frame.dropna(subset=["fused_gain_ns"]), "fused_gain_ns")
    step = mean_step_ns(run)
    gain = saving(run, gone)
    if gain / step < NOTABLE_SHARE:
        return Clear(f"a fused {name} would shorten the step by {percent(gain / step)}")
    worst = max(gone, key=lambda r: gone[r])
    mine = frame[frame["rank"] == worst].iloc[0]
    parameters = told.get("parameters")
    calls = float(mine["calls"])
    many = "" if math.isnan(calls) else f", in {calls:,.0f} {'operators' if on_cpu else 'kernels'}"
    of = f" for {parameters:,} parameter tensors" if parameters else ""
    now = "one after the other" if told.get("foreach") is False or (on_cpu and not told.get("foreach")) else "in passes"
    after = max(float(mine["ns"]) - gone[worst], 0.0)
    parts = [("now", float(mine["ns"])), ("fused, as predicted", after)]
    return Finding(
        title="The optimizer is not fused",
        summary=f"{name} takes {duration(mine['ns'])} of each step{of}{many}; it goes through them {now}.",
        verdict=f"{percent(gain / step)} {of_step(run)} is spent on an optimizer that is not fused.",
        noise_ns=float(frame["noise_ns"].max()),
        saving_ns=gain,
        advice=(f"`{name}(..., fused=True)` (is {told.get('fused')}; foreach is {told.get('foreach')})",),
        evidence=Panel("bars", f"The optimizer's part of a step on rank {worst}", tuple(parts), unit="ns"),
        ranks=tuple(sorted(r for r, ns in gone.items() if ns >= gone[worst] / 2)),
        sure=f"A fused {name} is taken to need {percent(left)} of this one's time"
        + (", as measured on a CPU." if on_cpu else ", by the memory it touches; that was not measured on a GPU."),
    )


RULE = Rule(
    "unfused_optimizer",
    "Unfused optimizer",
    (optimizer_work, own_time, step_means),
    check,
    saves_from=("computation", "optimizer_host", "host", "other"),
)
