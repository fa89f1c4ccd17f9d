"""A normalisation is written out as mean, variance, root, product and sum, an operator each.

Each operator reads all activations and writes them again: ten passes through memory forward and thirty backward, where
one kernel makes two and five. In small layers it is ten launches for one.

Needs a trace. A chain is recognised by the order of its operators, forward and backward: a mean or a variance, then a
root, then a factor as wide as what the mean is of. No shapes are asked for, so that LayerNorm, GroupNorm and BatchNorm
are not told apart. What lies within another operator (`aten::layer_norm`) is left out, and so is code that
torch.compile generated.

Saving: the time of these chains less what one kernel takes of it, by what both read and write; the traced steps are
replayed with so many fewer kernels and launches. On a CPU one operator took 6 to 23 % of such a chain; PyTorch's
RMSNorm is itself a chain there, and none is judged.

What to change: `nn.LayerNorm`, `nn.RMSNorm` (one kernel from torch 2.9 on), `nn.GroupNorm`, `nn.BatchNorm2d`, or their
functions in `torch.nn.functional`; where the formula is another, `torch.compile` of the module that holds it.
"""

from __future__ import annotations

from dlprof.analysis import settings
from dlprof.analysis.chains.norms import LAYER, RMS
from dlprof.analysis.chains.work import gains
from dlprof.analysis.engine import Frame, Job, Maybe
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.panel import table
from dlprof.units import duration, often

_COLUMNS = {
    "form": "statistics",
    "passes": "pass",
    "calls": "times a step",
    "operators": "operators each",
    "ns": "takes_ns",
    "left_ns": "in one kernel, as predicted_ns",
}
_CHANGES = {
    LAYER: change(
        "`torch.nn.functional.layer_norm(x, (width,), weight, bias)` in place of mean, variance and root; over other"
        " dimensions `group_norm` or `batch_norm`"
    ),
    RMS: change(
        "`torch.nn.functional.rms_norm(x, (width,), weight, eps)` in place of square, mean and root: one kernel from"
        " torch 2.9 on"
    ),
}
_COMPILED = change("`torch.compile` of the module that holds it: its operators become one kernel each way")


def check(norms: Frame, cpu_parts: Maybe[Frame], cpu_work: Maybe[Frame], job: Job) -> Estimate:
    if norms.empty:
        return nothing("no normalisation is written out")
    return Estimate(
        gone_ns=gains(norms, cpu_parts, cpu_work, settings.on_cpu(job)),
        noise_of=("computation",),
        loses="would be saved by normalising in one kernel",
    )


def explain(estimate: Estimate, norms: Frame, mean_step_ns: float) -> Explanation:
    mine = estimate.rows(norms)
    times = float(mine.loc[mine["passes"] == "forward", "calls"].sum())
    forms = mine.groupby("form", sort=False)["ns"].sum().sort_values(ascending=False).index.tolist()
    return Explanation(
        title="Normalisations are written out operator by operator",
        summary=f"Rank {estimate.worst} normalises {often(times)} a step by separate operators, for"
        f" {duration(mine['ns'].sum())} of {duration(mean_step_ns)}; one kernel would do what"
        f" {mine['operators'].max():.0f} do.",
        changes=(*(_CHANGES[form] for form in forms), _COMPILED),
        evidence=table(f"Normalisations that are written out, a step of rank {estimate.worst}", mine, _COLUMNS),
        sure="Estimated by what one kernel reads and writes of what these do, and no sooner than the host launches.",
    )


RULE = Rule("Normalisation written out", check, explain, saves_from=("computation", "host", "launch_latency"))
