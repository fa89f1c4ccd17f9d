"""Training stood still for a while, once or a few times.

A worker that waits for a lock or a slow storage, a server that does not answer, a machine that swaps, a retry with a
pause: one step then takes as long as thousands of others. It is no part of the mean step, and no property of the steps
that could be cured in each of them.

Needs the step log. Up to three steps count that take a second or more and fifty times as long as the median, a
twentieth of all steps' time or more, besides what collections of garbage, checkpoints and compilations took of them.

Saving: what these steps took longer than the others, spread over the training steps; its share is that of the run. A
run in which it does not happen again has nothing to gain.

What to change: what the line waits for that was seen in that phase of the step most; a time-out on what may not answer.
"""

from __future__ import annotations

import pandas as pd

from dlprof.analysis.engine import Frame, Maybe, maybe, needs, per_rank
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.source.line_shares import CostlyLine, costliest, costly_lines
from dlprof.analysis.step.whole_job import training_steps
from dlprof.analysis.timeline.steady import light_steps
from dlprof.result import Change
from dlprof.units import count, duration

# The phases of a step, in words and by whose stacks they are explained.
_PHASES = {
    "fetch": ("in next() of its loader", ("worker", "fetch")),
    "forward": ("in the forward pass", ("forward",)),
    "backward": ("in the backward pass", ("backward",)),
    "optimizer": ("in the optimizer", ("optimizer",)),
    "rest": ("between the phases", ("rest",)),
}


@per_rank
def stood_still(light_steps: Frame = needs(light_steps)) -> pd.DataFrame:
    """Return the steps in which training stood still: step, ns (longer than the median steady step), phase, of it."""
    found = light_steps[light_steps["kind"] == "stalled"]
    parts = pd.DataFrame({name: found[f"{name}_ns"].clip(lower=0) for name in _PHASES if name != "rest"}, dtype=float)
    parts["rest"] = found["dur_ns"] - parts.sum(axis=1)
    usual = light_steps.loc[light_steps["steady"], "dur_ns"].median()
    return pd.DataFrame(
        {
            "step": found["step"],
            "ns": (found["dur_ns"] - usual).astype(float),
            "phase": parts.idxmax(axis=1) if len(parts) else pd.Series(dtype=object),
            "of_ns": parts.max(axis=1),
        }
    )


def check(
    stood_still: Frame = needs(stood_still), training_steps: pd.Series[float] = needs(training_steps)
) -> Estimate:
    if not len(stood_still):
        return nothing("in no step training stood still", scope="run")
    each = stood_still.groupby("rank")["ns"].sum()
    return Estimate(
        saving_ns=float((each / training_steps).max()),
        by_rank_ns={int(str(rank)): float(ns) for rank, ns in each.items()},
        scope="run",
        loses="passed while training stood still",
        seen=stood_still,
    )


def explain(estimate: Estimate, costly_lines: Maybe[Frame] = maybe(costly_lines)) -> Explanation:
    rank, mine = estimate.worst, estimate.rows(estimate.seen).sort_values("ns", ascending=False)
    first, total = mine.iloc[0], duration(float(mine["ns"].sum()))
    where, doing = _PHASES[str(first["phase"])]
    line = next((line for one in doing if (line := costliest(costly_lines, rank, one)) is not None), None)
    steps = f"step {int(first['step']):,}" + (f" and {len(mine) - 1} more" if len(mine) > 1 else "")
    return Explanation(
        title=f"Training stood still for {total}",
        summary=f"Rank {rank} stood still in {steps}, {duration(float(first['of_ns']))} of it {where}."
        + (f" Of what was seen there, {line.shown.rstrip(',')} was seen most." if line is not None else ""),
        changes=(_change(line, str(first["phase"])),),
        sure=f"Measured: {count(len(mine), 'step')}. That the line which was seen most in that phase is what training"
        " stood still for is likely, and not sure. A run in which it does not happen again has nothing to gain.",
        verdict=f"Training stood still for {total}, {where}{f': {line.does}' if line and line.does else ''}.",
        at_most=True,
        where=() if line is None else (line.place,),
    )


def _change(line: CostlyLine | None, phase: str) -> Change:
    if line is not None:
        return change(line.advice("find out what this line waits for, and give it a time-out:"))
    if phase == "fetch":
        return change("`DataLoader(..., timeout=60)`: a worker that stands still then ends the job with its stack")
    return change("record it again with py-spy, or look at it while it stands still: `py-spy dump --pid PID`")


RULE = Rule("Steps in which training stood still", check, explain, notable=0.05)
