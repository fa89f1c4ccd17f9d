"""A line of the model is known to do work that need not be done, or not so.

Positions and masks that are the same in each step, the differences of all pairs where a product of matrices would do,
a graph that is walked again: the operators of such a line are as fast as they can be, and no rule on operators sees
that they are too many.

Needs a job that trains on a CPU, the step log, the stacks that py-spy saw in its forward and backward passes, and a
line that takes a fifth of them and of which the source says what it does. On a GPU the stacks show what the host does,
and not where the device's time goes.

Saving: the line's share of the stacks in the pass, of that pass; with a forward pass, as much of the backward pass, and
with a loss that is written out in a loop, all of it: the most that it can be.

What to change: what the line is known to be.
"""

from __future__ import annotations

from dlprof.analysis.engine import Frame, Maybe, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.source.line_shares import CostlyLine, call_sites, costliest, costly_lines, is_at
from dlprof.analysis.source.patches import Call
from dlprof.analysis.timeline.steps import mean_step_ns, phases_of_step
from dlprof.units import duration, percent

# What goes with a line of a pass, or of a loss: autograd runs the line's part of the backward pass elsewhere.
_PASSES = {"forward": ("forward", "backward"), "backward": ("backward",), "rest": ("rest", "backward")}
_NAMED = {"forward": "the forward pass", "backward": "the backward pass", "rest": "the loss"}


def check(
    costly_lines: Maybe[Frame] = maybe(costly_lines),
    phases_of_step: Frame = needs(phases_of_step),
    call_sites: Maybe[list[Call]] = maybe(call_sites),
) -> Estimate:
    costly_lines.get()
    losses = [call for call in call_sites.or_none() or () if call.kind == "loss"]
    ns = {(int(r), p): float(ns) for r, p, ns in phases_of_step[["rank", "phase", "ns"]].itertuples(index=False)}
    found: dict[int, tuple[float, str, CostlyLine]] = {}
    for rank in {rank for rank, _ in ns}:
        for phase, passes in _PASSES.items():
            line = costliest(costly_lines, rank, phase)
            if line is None or line.idiom is None or not line.idiom.first:
                continue
            if phase != "rest" or any(is_at(call, line.place.file, line.place.line) for call in losses):
                own, *also = (ns[rank, one] for one in passes)
                took = line.share * own + sum(also) * (1.0 if phase == "rest" else line.share)
                found[rank] = max(found.get(rank, (0.0, "", line)), (took, phase, line), key=lambda one: one[0])
    if not found:
        return nothing("no line of the model is known to do needless work")
    return Estimate(
        gone_ns={rank: took for rank, (took, _, _) in found.items()}, loses="goes to one line of the model", seen=found
    )


def explain(estimate: Estimate, mean_step_ns: float = needs(mean_step_ns)) -> Explanation:
    took, phase, line = estimate.seen[estimate.worst]
    name, alone = _NAMED[phase], phase == "backward"
    both = ":" if alone else "; with its part of the backward pass that is"
    return Explanation(
        title=f"A line of {name} does more than it must",
        summary=f"{percent(line.share)} of the stacks in {name} of rank {estimate.worst} are in {line.shown}"
        f" and the lines around it{both} up to {duration(took)} of a step.",
        changes=(change(line.advice()),),
        verdict=f"Up to {percent(took / mean_step_ns)} of each step goes to one line: {line.does}.",
        sure=f"Estimated as the line gone, by its share of the stacks in {name}"
        + ("." if alone else "; that it takes as much of the backward pass is assumed."),
        at_most=True,
        where=(line.place,),
    )


RULE = Rule(
    "Needless work in a line of the model",
    check,
    explain,
    ("computation", "host", "other"),
    notable=0.05,
    only_with="cpu",
)
