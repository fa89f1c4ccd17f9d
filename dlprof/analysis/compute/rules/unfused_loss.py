"""The loss reads and writes the logits more often than PyTorch's cross entropy does.

With a large vocabulary the logits are the largest tensor of a step. A softmax followed by log and indexing, one-hot
targets, or `logsumexp` minus the target's logit write tensors of that size several times, forward and backward. A
float32 copy of 16-bit logits (`logits.float()`, or autocast) costs as much again: everything after it is twice as wide.

Needs a trace. The rule looks for the order of operators, forward and backward; a float32 copy shows, on a GPU, by the
kernel that casts the gradient back. `log_softmax` with `nll_loss` or `gather` was measured to be as fast as
`cross_entropy` and is not reported. Neither are losses with soft targets, nor code from torch.compile.

Saving: the time of these operators less what PyTorch's cross entropy takes: 35 to 50 % of it, by measurements on a CPU
and by the bytes that both move; a third with a float32 copy. On a GPU the traced steps are replayed with fewer kernels
and launches.

What to change: `torch.nn.functional.cross_entropy(logits, target)`, with class indices as targets. For a float32 copy:
`torch.compile` the loss, which keeps the copy in registers, or compute the loss from 16-bit logits outside autocast,
which changes numbers. `torch.nn.functional.linear_cross_entropy` (torch 2.13) computes the logits in chunks and saves
their memory too.
"""

from __future__ import annotations

from dlprof.analysis import settings
from dlprof.analysis.chains.calls import gains
from dlprof.analysis.chains.written_out import COPY, losses
from dlprof.analysis.compute.cpu_work import cpu_parts, cpu_work
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.panel import table
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.units import duration, often

_COLUMNS = {
    "form": "computed by",
    "passes": "pass",
    "calls": "times a step",
    "operators": "operators each",
    "ns": "takes_ns",
    "left_ns": "predicted as cross_entropy_ns",
}
_PLAIN = change("`torch.nn.functional.cross_entropy(logits, target)`, with class indices as `target`")
_COPIED = (
    change("`torch.compile` the function that casts the logits and computes the loss"),
    change("`cross_entropy` of the 16-bit logits, outside autocast: it still accumulates in float32", numerics=True),
)


def check(
    losses: Frame = needs(losses),
    cpu_parts: Maybe[Frame] = maybe(cpu_parts),
    cpu_work: Maybe[Frame] = maybe(cpu_work),
    job: Job = needs(JOB),
) -> Estimate:
    if losses.empty:
        return nothing("no loss reads and writes its logits more often than cross_entropy does")
    return Estimate(
        gone_ns=gains(losses, cpu_parts, cpu_work, settings.on_cpu(job)),
        noise_of=("computation",),
        loses="would be saved by a fused cross entropy",
    )


def explain(
    estimate: Estimate, losses: Frame = needs(losses), mean_step_ns: float = needs(mean_step_ns)
) -> Explanation:
    mine = estimate.rows(losses)
    times = float(mine.loc[mine["passes"] == "forward", "calls"].sum())
    forms = mine["form"].unique().tolist()
    return Explanation(
        title="The loss is not fused",
        summary=f"Rank {estimate.worst} computes its loss {often(times)} a step with {' and '.join(forms)}, which takes"
        f" {duration(mine['ns'].sum())} of the {duration(mean_step_ns)} step. A fused cross entropy would take"
        f" {duration(mine['left_ns'].sum())}.",
        changes=(*((_PLAIN,) if set(forms) - {COPY} else ()), *(_COPIED if COPY in forms else ())),
        evidence=table(f"Losses, a step of rank {estimate.worst}", mine, _COLUMNS),
        sure="Estimated from the bytes that cross_entropy reads and writes compared with these operators.",
    )


RULE = Rule("Unfused loss", check, explain, saves_from=("computation", "host", "launch_latency"))
