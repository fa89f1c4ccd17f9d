"""Training stops again and again while Python looks for garbage.

Python's collector runs when enough objects were made, and stops every thread of the process meanwhile. A search of the
oldest generation goes through all objects that are alive: data sets kept as lists, tokenizers, configurations, modules.
The more there are, the longer every pause, whether or not anything is found.

Needs the stalls that dlprof records beside the light layer: pauses of a millisecond or more in every steady step. On a
GPU also a trace: a pause counts as far as device work leaves room for it. With several ranks, a pause of one holds up
all that wait for it.

Saving: the pauses gone altogether.

What to change: after start-up, `gc.collect()` and `gc.freeze()`, so that what is there for good is never searched
again; or `gc.disable()`, and `gc.collect()` every k steps, on all ranks in the same step, so that they pause together.
Then find what makes garbage in cycles at every step.
"""

from __future__ import annotations

import math

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.engine import Job
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change
from dlprof.analysis.step.breakdown import part, part_noise
from dlprof.analysis.step.panels.steps import stall_bars
from dlprof.analysis.step.savings import saving_stalls
from dlprof.result import Change
from dlprof.units import count, digits, duration, percent

# What pauses may cost once they come at a fixed interval: an interval is proposed that brings them to this.
GOAL_SHARE = 0.005

_KIND = "garbage_collection"


def check(
    breakdown: pd.DataFrame, stall_means: pd.DataFrame, stalled_steps: pd.DataFrame, own_time: pd.DataFrame
) -> Estimate:
    """Estimate the pauses of each rank, and what the job would gain without them."""
    paused = part(breakdown, _KIND)
    return Estimate(
        saving_ns=saving_stalls(stalled_steps, stall_means, own_time, _KIND, paused),
        by_rank_ns=paused,
        noise_ns=part_noise(breakdown, _KIND),
        loses="is Python's search for garbage",
    )


def explain(
    estimate: Estimate, stall_means: pd.DataFrame, stalled_steps: pd.DataFrame, mean_step_ns: float, job: Job
) -> Explanation:
    """Tell how often and how long they are, and how often they would come at a fixed interval."""
    (means, steps) = (frame[frame["kind"] == _KIND] for frame in (stall_means, stalled_steps))
    mine = means[means["rank"] == estimate.worst].to_dict("records")[0]
    steps = steps[steps["rank"] == estimate.worst]
    longest = float(mine["longest_ns"])
    return Explanation(
        title="Python's garbage collector stops training",
        summary=f"{count(int(mine['stalls']), 'pause')} in {int(mine['steps']):,} steady steps of rank {mine['rank']},"
        f" in one step of {digits(float(mine['every']))}; the longest took {duration(longest)}.",
        changes=_changes(longest, mean_step_ns, steps),
        evidence=stall_bars(steps, int(mine["rank"]), "Garbage collection"),
        sure="Measured in every steady step, pauses under a millisecond left out; estimated as all of it gone."
        + ("" if settings.on_cpu(job) else " Of pauses behind which the GPU still works it may count too much."),
    )


def _changes(longest: float, step: float, steps: pd.DataFrame) -> tuple[Change, ...]:
    apart = max(2, math.ceil(longest / (GOAL_SHARE * step)))
    full = int((steps["generation"] == 2).sum())
    searched = f": {count(full, 'step')} searched all objects" if full else ""
    return (
        change(f"`gc.collect(); gc.freeze()` once after start-up{searched}, and what lives on is then left out"),
        change(
            f"`gc.disable()`, and `gc.collect()` every {apart:,} steps, on all ranks at once: at {duration(longest)}"
            f" each that is {percent(longest / apart / step)} of the step"
        ),
    )


RULE = Rule("gc_pauses", "Pauses for garbage collection", check, explain, saves_from=("garbage_collection",))
