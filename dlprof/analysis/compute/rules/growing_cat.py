"""A tensor grows by `torch.cat` in a loop, which copies all of it in every round.

`acc = torch.cat([acc, x])` for n pieces copies n ÷ 2 times as much as one `cat` of all pieces behind the loop.

Needs a trace. Such a loop is eight calls or more of `cat` with the same operators between them, within one step, whose
time rises evenly. Where what lies between them takes longer and longer as well, the loop reads what there is so far, as
DenseNet does, and needs it: that is none. Nor is a tensor that grows from step to step.

Saving: the time of all these calls but the last one, which copies what one `cat` would.

What to change: append the pieces to a list and call `torch.cat(pieces)` once, behind the loop; or write them into a
tensor of the final size, `out[i] = x`.
"""

from __future__ import annotations

from dlprof.analysis import settings
from dlprof.analysis.chains.work import gains
from dlprof.analysis.engine import Frame, Job, Maybe
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.panel import table
from dlprof.units import duration, often

_COLUMNS = {"passes": "pass", "calls": "calls a step", "ns": "takes_ns", "left_ns": "one call, as predicted_ns"}
_LIST = change("append the pieces to a list, and `torch.cat(pieces)` once, behind the loop")
_BUFFER = change("or write them into a tensor of the final size: `out[i] = x`")


def check(growing_cats: Frame, cpu_parts: Maybe[Frame], cpu_work: Maybe[Frame], job: Job) -> Estimate:
    if growing_cats.empty:
        return nothing("no tensor grows by cat in a loop")
    return Estimate(
        gone_ns=gains(growing_cats, cpu_parts, cpu_work, settings.on_cpu(job)),
        noise_of=("computation",),
        loses="is spent copying tensors that grow by cat in a loop",
    )


def explain(estimate: Estimate, growing_cats: Frame, mean_step_ns: float) -> Explanation:
    mine = estimate.rows(growing_cats)
    forward = mine[mine["passes"] == "forward"]
    return Explanation(
        title="A tensor grows by cat in a loop",
        summary=f"Rank {estimate.worst} calls cat {often(float(forward['calls'].sum()))} a step on tensors that grow,"
        f" for {duration(mine['ns'].sum())} of {duration(mean_step_ns)}; one call for each would take"
        f" {duration(mine['left_ns'].sum())}.",
        changes=(_LIST, _BUFFER),
        evidence=table(f"cat in loops, a step of rank {estimate.worst}", mine, _COLUMNS),
        sure="Estimated by the last call, which copies all pieces.",
    )


RULE = Rule("Tensor grown by cat", check, explain, saves_from=("computation", "host", "launch_latency"))
