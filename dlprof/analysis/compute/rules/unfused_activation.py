"""GELU is computed by separate operators (power, tanh or erf, multiply, add) instead of one kernel.

Each operator reads and writes the whole activation tensor: some eighteen passes over memory in the forward pass and
thirty in the backward pass, where one kernel makes two and three. Early code of GPT and BERT has it written out, and
much was copied from there.

Needs a trace. The rule looks for the order of the operators: a polynomial, tanh, + 1 and a product, or a quotient, erf,
+ 1 and a product. Operators inside another one (`aten::gelu`) and code from torch.compile do not count.

Saving: the time of these operators less what one kernel takes, by the bytes that each reads and writes; the traced
steps are replayed with fewer kernels and launches. On a CPU one operator took 15 to 57 % of the time of the separate
ones: the saving is that of the middle.

What to change: `torch.nn.functional.gelu(x, approximate="tanh")` for the form with tanh, `gelu(x)` for that with erf.
"""

from __future__ import annotations

from dlprof.analysis import settings
from dlprof.analysis.chains.calls import gains
from dlprof.analysis.chains.written_out import ERF, TANH, gelus
from dlprof.analysis.compute.cpu_work import cpu_parts, cpu_work
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.panel import table
from dlprof.analysis.source.line_shares import busiest
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.units import duration, often, percent

_COLUMNS = {
    "form": "by",
    "passes": "pass",
    "calls": "times a step",
    "operators": "operators each",
    "ns": "takes_ns",
    "left_ns": "predicted as one kernel_ns",
}
_CHANGES = {
    TANH: change(
        '`torch.nn.functional.gelu(x, approximate="tanh")` instead of power, tanh and products (transformers:'
        ' "gelu_pytorch_tanh" instead of "gelu_new" in the configuration)'
    ),
    ERF: change("`torch.nn.functional.gelu(x)` instead of erf and products"),
}


def check(
    gelus: Frame = needs(gelus),
    cpu_parts: Maybe[Frame] = maybe(cpu_parts),
    cpu_work: Maybe[Frame] = maybe(cpu_work),
    job: Job = needs(JOB),
) -> Estimate:
    if gelus.empty:
        return nothing("no GELU is computed by separate operators")
    return Estimate(
        gone_ns=gains(gelus, cpu_parts, cpu_work, settings.on_cpu(job)),
        noise_of=("computation",),
        loses="would be saved by a fused GELU",
    )


def explain(
    estimate: Estimate, gelus: Frame = needs(gelus), mean_step_ns: float = needs(mean_step_ns), job: Job = needs(JOB)
) -> Explanation:
    mine = estimate.rows(gelus)
    times = float(mine.loc[mine["passes"] == "forward", "calls"].sum())
    forms = mine.groupby("form", sort=False)["ns"].sum().sort_values(ascending=False).index.tolist()
    names = {f"aten::{form}" for form in forms}
    return Explanation(
        title="GELU is not fused",
        summary=f"Rank {estimate.worst} computes GELU {often(times)} a step with up to {mine['operators'].max():.0f}"
        f" separate operators each time. They take {duration(mine['ns'].sum())} of the {duration(mean_step_ns)} step;"
        f" one kernel each time would take {duration(mine['left_ns'].sum())}.",
        changes=tuple(_CHANGES[form] for form in forms),
        evidence=table(f"GELU by separate operators, a step of rank {estimate.worst}", mine, _COLUMNS),
        where=busiest(job.facts.get(estimate.worst, {}), "forward", "forward", names),
        sure=f"Estimated: one kernel takes {percent(mine['left_ns'].sum() / mine['ns'].sum())} of these operators'"
        " time, by the bytes that both move (on a CPU: by measurements).",
    )


RULE = Rule("Unfused GELU", check, explain, saves_from=("computation", "host", "launch_latency"))
