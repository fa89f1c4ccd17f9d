"""Training stops again and again while Python looks for garbage.

Python's collector runs when enough objects were made, and stops every thread of the process meanwhile. A search of the
oldest generation goes through all objects that are alive: data sets kept as lists, tokenizers, configurations, modules.
The more there are, the longer every pause, whether or not anything is found.

Needs the stalls that dlprof records with the step log: pauses of a millisecond or more in every steady step. On a GPU
also a trace: pauses count up to the step's time without device work. With several ranks, a pause of one delays all
that wait for it.

Saving: the pauses gone altogether.

What to change: after start-up, `gc.collect()` and `gc.freeze()`, so that what is there for good is never searched
again; or `gc.disable()`, and `gc.collect()` every k steps, on all ranks in the same step.
Then find what makes garbage in cycles at every step.
"""

from __future__ import annotations

from collections.abc import Mapping

from dlprof.analysis import settings
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change
from dlprof.analysis.panels.step import stall_bars
from dlprof.analysis.source.line_shares import costliest, costly_lines
from dlprof.analysis.step.breakdown import breakdown, part
from dlprof.analysis.step.savings import stall_savings
from dlprof.analysis.timeline.stalls import stall_means, stalled_steps, stalls_of
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.units import count, duration, every, percent, typed

# What pauses may cost once they come at a fixed interval: an interval is proposed that brings them to this.
GOAL_SHARE = 0.005

_KIND = "garbage_collection"


def check(breakdown: Frame = needs(breakdown), stall_savings: Mapping[str, float] = needs(stall_savings)) -> Estimate:
    return Estimate(
        saving_ns=stall_savings[_KIND],
        by_rank_ns=part(breakdown, _KIND),
        noise_of=(_KIND,),
        loses="is Python's garbage collection",
    )


def explain(
    estimate: Estimate,
    stall_means: Frame = needs(stall_means),
    stalled_steps: Frame = needs(stalled_steps),
    mean_step_ns: float = needs(mean_step_ns),
    costly_lines: Maybe[Frame] = maybe(costly_lines),
    job: Job = needs(JOB),
) -> Explanation:
    rank = estimate.worst
    line = costliest(costly_lines, rank, "rest")
    by_hand = line if line is not None and line.idiom is not None and line.idiom.name == "collected_by_hand" else None
    (mine,) = stalls_of(stall_means, _KIND, rank).to_dict("records")
    steps, longest = stalls_of(stalled_steps, _KIND, rank), float(mine["longest_ns"])
    apart = max(2, typed(longest / (GOAL_SHARE * mean_step_ns)))
    full = int((steps["generation"] == 2).sum())
    searched = f": {count(full, 'step')} searched all objects" if full else ""
    return Explanation(
        title="Python's garbage collector stops training",
        summary=f"{count(int(mine['stalls']), 'pause')} in {int(mine['steps']):,} steady steps of rank {rank},"
        f" one in {every(float(mine['every']), 'step')}; the longest took {duration(longest)}.",
        where=(by_hand.place,) if by_hand else (),
        changes=(
            *((change(by_hand.advice()),) if by_hand else ()),
            change(
                f"`gc.freeze()` once after start-up, behind a `gc.collect()`{searched}, which exempts the objects made"
                " so far"
            ),
            change(
                f"`gc.disable()`, and `gc.collect()` every {apart:,} steps, on all ranks at once: at"
                f" {duration(longest)} each that is {percent(longest / apart / mean_step_ns)} of the step"
            ),
        ),
        at_most=True,
        evidence=stall_bars(steps, rank, "Garbage collection"),
        sure="Measured in every steady step, pauses under a millisecond left out; estimated as all of it gone."
        + ("" if settings.on_cpu(job) else " Pauses during which the GPU still works may be counted too high."),
    )


RULE = Rule("Pauses for garbage collection", check, explain, saves_from=(_KIND,))
