"""The loss moves its logits through memory more often than a cross entropy does.

Of a large vocabulary the logits are the largest tensor of a step. A softmax, its logarithm and an index, one-hot
targets, or `logsumexp` less the target's logit write them several times, forward and backward. So does a float32 copy
of 16-bit logits, by `logits.float()` or by autocast, and everything behind it is twice as wide.

Needs a trace. The forms are recognised by the order of operators, forward and backward; a copy, on a GPU, by the kernel
that casts the gradient back. `log_softmax` with `nll_loss` or `gather` is as fast as `cross_entropy`, as measured, and
no finding. Losses with soft targets are none either, nor is code that torch.compile generated.

Saving: the time of these chains less the share that PyTorch's cross entropy takes: 35 to 50 % of what is written out,
as measured on a CPU and as what both move; a third of one with a float32 copy. On a GPU the traced steps are replayed
with so many fewer kernels and launches.

What to change: `torch.nn.functional.cross_entropy(logits, target)`, with class indices as targets. For a float32 copy,
`torch.compile` of the loss, which keeps it in registers; or 16-bit logits outside of autocast, which changes numbers.
`torch.nn.functional.linear_cross_entropy` (torch 2.13) makes the logits piece by piece, and saves their memory too.
"""

from __future__ import annotations

from dlprof.analysis import settings
from dlprof.analysis.chains.losses import COPY
from dlprof.analysis.chains.work import gains
from dlprof.analysis.engine import Frame, Job, Maybe
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.panel import table
from dlprof.units import duration, often

_COLUMNS = {
    "form": "written as",
    "passes": "pass",
    "calls": "times a step",
    "operators": "operators each",
    "ns": "takes_ns",
    "left_ns": "as cross_entropy, as predicted_ns",
}
_PLAIN = change("`torch.nn.functional.cross_entropy(logits, target)`, with class indices as `target`")
_COPIED = (
    change("`torch.compile` of the function that casts the logits and computes the loss"),
    change(
        "cross entropy of the 16-bit logits, outside of autocast: it adds up in float32 all the same", numerics=True
    ),
)


def check(losses: Frame, cpu_parts: Maybe[Frame], cpu_work: Maybe[Frame], job: Job) -> Estimate:
    if losses.empty:
        return nothing("no loss moves its logits more often than cross_entropy does")
    return Estimate(
        gone_ns=gains(losses, cpu_parts, cpu_work, settings.on_cpu(job)),
        noise_of=("computation",),
        loses="would be saved by a loss that moves its logits less often",
    )


def explain(estimate: Estimate, losses: Frame, mean_step_ns: float) -> Explanation:
    mine = estimate.rows(losses)
    times = float(mine.loc[mine["passes"] == "forward", "calls"].sum())
    forms = mine["form"].unique().tolist()
    return Explanation(
        title="The loss moves its logits too often",
        summary=f"Rank {estimate.worst} computes its loss {often(times)} a step by {' and '.join(forms)}, for"
        f" {duration(mine['ns'].sum())} of {duration(mean_step_ns)}; a cross entropy would take"
        f" {duration(mine['left_ns'].sum())}.",
        changes=(*((_PLAIN,) if set(forms) - {COPY} else ()), *(_COPIED if COPY in forms else ())),
        evidence=table(f"Losses, a step of rank {estimate.worst}", mine, _COLUMNS),
        sure="Estimated by what cross_entropy reads and writes of what these do.",
    )


RULE = Rule("Loss written out", check, explain, saves_from=("computation", "host", "launch_latency"))
