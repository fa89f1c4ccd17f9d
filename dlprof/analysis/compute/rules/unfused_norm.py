"""A normalisation layer is computed by separate operators (mean, variance, square root, ...) instead of one kernel.

Each operator reads and writes the whole activation tensor: about ten passes over memory in the forward pass and thirty
in the backward pass, where a fused kernel makes two and five. In small layers the cost is ten launches instead of one.

Needs a trace. The rule looks for this order of operators, forward and backward: a mean or a variance, a square root,
and a multiplication as wide as the input of the mean. It needs no shapes, so it cannot tell LayerNorm, GroupNorm and
BatchNorm apart. Operators inside another operator (`aten::layer_norm`) and code from torch.compile do not count.

Saving: the time of these operators less what one kernel takes, by the bytes that each reads and writes; the traced
steps are replayed with fewer kernels and launches. On a CPU one operator took 6 to 23 % of the time of the separate
ones. PyTorch's own RMSNorm is a chain of operators on a CPU, so no RMSNorm is reported there.

What to change: `nn.LayerNorm`, `nn.RMSNorm` (one kernel from torch 2.9 on), `nn.GroupNorm`, `nn.BatchNorm2d`, or their
functions in `torch.nn.functional`. For any other formula: `torch.compile` of the module that computes it.
"""

from __future__ import annotations

from dlprof.analysis import settings
from dlprof.analysis.chains.calls import gains
from dlprof.analysis.chains.written_out import LAYER, RMS, norms
from dlprof.analysis.compute.cpu_work import cpu_parts, cpu_work
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.panel import table
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.units import duration, often, percent

_COLUMNS = {
    "form": "statistics",
    "passes": "pass",
    "calls": "times a step",
    "operators": "operators each",
    "ns": "takes_ns",
    "left_ns": "predicted as one kernel_ns",
}
_CHANGES = {
    LAYER: change(
        "`torch.nn.functional.layer_norm(x, (width,), weight, bias)` instead of mean, variance and square root;"
        " `group_norm` or `batch_norm` over other dimensions"
    ),
    RMS: change(
        "`torch.nn.functional.rms_norm(x, (width,), weight, eps)` instead of square, mean and square root: one kernel"
        " from torch 2.9 on"
    ),
}
_COMPILED = change("or `torch.compile` the module: its operators become one kernel forward and one backward")


def check(
    norms: Frame = needs(norms),
    cpu_parts: Maybe[Frame] = maybe(cpu_parts),
    cpu_work: Maybe[Frame] = maybe(cpu_work),
    job: Job = needs(JOB),
) -> Estimate:
    if norms.empty:
        return nothing("no normalisation is computed by separate operators")
    return Estimate(
        gone_ns=gains(norms, cpu_parts, cpu_work, settings.on_cpu(job)),
        noise_of=("computation",),
        loses="would be saved by fused normalisation",
    )


def explain(estimate: Estimate, norms: Frame = needs(norms), mean_step_ns: float = needs(mean_step_ns)) -> Explanation:
    mine = estimate.rows(norms)
    times = float(mine.loc[mine["passes"] == "forward", "calls"].sum())
    forms = mine.groupby("form", sort=False)["ns"].sum().sort_values(ascending=False).index.tolist()
    return Explanation(
        title="Normalisation is not fused",
        summary=f"Rank {estimate.worst} normalises {often(times)} a step with up to"
        f" {mine['operators'].max():.0f} separate operators each time. They take {duration(mine['ns'].sum())} of the"
        f" {duration(mean_step_ns)} step; one kernel each time would take {duration(mine['left_ns'].sum())}.",
        changes=(*(_CHANGES[form] for form in forms), _COMPILED),
        evidence=table(f"Normalisation by separate operators, a step of rank {estimate.worst}", mine, _COLUMNS),
        sure=f"Estimated: one kernel takes {percent(mine['left_ns'].sum() / mine['ns'].sum())} of these operators'"
        " time, by the bytes that both move (on a CPU: by measurements).",
    )


RULE = Rule("Unfused normalisation", check, explain, saves_from=("computation", "host", "launch_latency"))
