"""A tensor grows by `torch.cat` in a loop, which copies the whole tensor in every iteration.

`acc = torch.cat([acc, x])` in a loop over n pieces copies about n ÷ 2 times as much as one `cat` after the loop.

Needs a trace. The rule looks for eight or more calls of `cat` within a step, with the same operators between them,
whose time rises evenly. Where the operators between them take longer and longer too, the loop reads the growing tensor,
as DenseNet does, and needs it: that is not reported. Neither is a tensor that grows from step to step.

Saving: the time of all these calls but the last, which copies as much as the single `cat` would.

What to change: append the pieces to a list and call `torch.cat(pieces)` once after the loop; or write them into a
tensor of the final size, `out[i] = x`.
"""

from __future__ import annotations

from dlprof.analysis import settings
from dlprof.analysis.chains.calls import gains
from dlprof.analysis.chains.written_out import growing_cats
from dlprof.analysis.compute.cpu_work import cpu_parts, cpu_work
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.panel import table
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.units import duration, often

_COLUMNS = {"passes": "pass", "calls": "calls a step", "ns": "takes_ns", "left_ns": "predicted as one call_ns"}
_LIST = change("append the pieces to a list, and call `torch.cat(pieces)` once after the loop")
_BUFFER = change("or write them into a tensor of the final size: `out[i] = x`")


def check(
    growing_cats: Frame = needs(growing_cats),
    cpu_parts: Maybe[Frame] = maybe(cpu_parts),
    cpu_work: Maybe[Frame] = maybe(cpu_work),
    job: Job = needs(JOB),
) -> Estimate:
    if growing_cats.empty:
        return nothing("no tensor grows by cat in a loop")
    return Estimate(
        gone_ns=gains(growing_cats, cpu_parts, cpu_work, settings.on_cpu(job)),
        noise_of=("computation",),
        loses="is spent copying tensors that grow by cat in a loop",
    )


def explain(
    estimate: Estimate, growing_cats: Frame = needs(growing_cats), mean_step_ns: float = needs(mean_step_ns)
) -> Explanation:
    mine = estimate.rows(growing_cats)
    forward = mine[mine["passes"] == "forward"]
    return Explanation(
        title="A tensor grows by cat in a loop",
        summary=f"Rank {estimate.worst} calls cat {often(float(forward['calls'].sum()))} a step on growing tensors,"
        f" which takes {duration(mine['ns'].sum())} of the {duration(mean_step_ns)} step. One call after each loop"
        f" would take {duration(mine['left_ns'].sum())}.",
        changes=(_LIST, _BUFFER),
        evidence=table(f"cat in loops, a step of rank {estimate.worst}", mine, _COLUMNS),
        sure="Estimated from the time of the last call, which copies all pieces.",
    )


RULE = Rule("Tensor grown by cat", check, explain, saves_from=("computation", "host", "launch_latency"))
