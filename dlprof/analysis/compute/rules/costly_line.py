"""A line of the forward pass is known to do work that need not be done, or not so.

Positions and masks that are the same in each step, the differences of all pairs where a product of matrices would do,
a loop over rows: the operators of such a line are as fast as they can be, and no rule on operators sees that they are
too many.

Needs a job that trains on a CPU, the step log, the stacks that py-spy saw in its forward passes, and a line that takes
a fifth of them and of which the source says what it does. On a GPU the stacks show what the host does, and not where
the device's time goes.

Saving: the line's share of the stacks in the forward pass, of the forward pass and of the backward pass, as if the line
were gone: the most that it can be.

What to change: what the line is known to be.
"""

from __future__ import annotations

from dlprof.analysis import settings
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.idioms import LOOPS
from dlprof.analysis.source.line_shares import costliest, costly_lines
from dlprof.analysis.timeline.steps import mean_step_ns, phases_of_step
from dlprof.errors import NotMeasured
from dlprof.units import duration, percent


def check(
    costly_lines: Maybe[Frame] = maybe(costly_lines),
    phases_of_step: Frame = needs(phases_of_step),
    job: Job = needs(JOB),
) -> Estimate:
    if not settings.on_cpu(job):
        raise NotMeasured("whether the job trains on the CPU is not known")
    costly_lines.get()
    ns = phases_of_step.pivot_table(index="rank", columns="phase", values="ns")
    lines = {rank: costliest(costly_lines, rank, "forward") for rank in job.ranks}
    # Loops are host_bound's, which knows what of them is Python.
    known = {r: one for r, one in lines.items() if one and one.idiom and one.idiom.first and one.idiom.name != LOOPS}
    if not known:
        return nothing("no line of the forward pass is known to do needless work")
    each = {r: one.share * float(ns.loc[r, ["forward", "backward"]].sum()) for r, one in known.items()}
    return Estimate(
        gone_ns=each,
        loses="goes to a line of the forward pass, with its part of the backward pass",
        seen=known,
    )


def explain(estimate: Estimate, mean_step_ns: float = needs(mean_step_ns)) -> Explanation:
    line = estimate.seen[estimate.worst]
    took = estimate.by_rank_ns[estimate.worst]
    return Explanation(
        title="A line of the forward pass does more than it must",
        summary=f"{percent(line.share)} of the stacks in the forward pass of rank {estimate.worst} are in"
        f" {line.shown} and the lines around it; with its part of the backward pass that is up to {duration(took)} of a"
        " step.",
        changes=(change(line.advice()),),
        verdict=f"Up to {percent(took / mean_step_ns)} of each step goes to one line of the model: {line.does}.",
        sure="Estimated as the line gone, by its share of the stacks in the forward pass; that it takes as much of the"
        " backward pass is assumed.",
        at_most=True,
        where=(line.place,),
    )


RULE = Rule(
    "Needless work in the forward pass",
    check,
    explain,
    ("computation", "host", "other"),
    notable=0.05,
    only_with="cpu",
)
