"""One-hot rows are multiplied by a matrix to select some of its rows, which an embedding does without a product.

The product of N one-hot rows of V classes and a V × h matrix reads N × V zeros and ones, which were made as integers
and cast, and multiplies all of them. `embedding` reads N rows. The gradient is another such product.

Needs a trace. The rule looks for `one_hot` or `scatter_`, a cast, and a product right after it. Where shapes are known
(`record_shapes=True`, or dlprof's count of a step) the time of an embedding is estimated; otherwise only the time to
make the one-hot rows counts as saved. One-hot targets belong to `unfused_loss`. Rows that are concatenated with other
features need their product and are not reported.

Saving: the time to make the one-hot rows, of the product and of its gradient, less what an embedding takes: the
product's time scaled by the bytes that an embedding moves.

What to change: `nn.Embedding`, or `torch.nn.functional.embedding(index, weight)` instead of `one_hot` and the product
(with `weight.t()` of an `nn.Linear`).
"""

from __future__ import annotations

from dlprof.analysis import settings
from dlprof.analysis.chains.calls import gains
from dlprof.analysis.chains.written_out import one_hots
from dlprof.analysis.compute.cpu_work import cpu_parts, cpu_work
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.panel import table
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.units import duration, often

_COLUMNS = {
    "form": "operators",
    "passes": "pass",
    "calls": "times a step",
    "ns": "takes_ns",
    "left_ns": "as an embedding, at most_ns",
}
_EMBEDDING = change(
    "`torch.nn.functional.embedding(index, weight)` instead of `one_hot` and the product (with `weight.t()` of an"
    " `nn.Linear`)"
)


def check(
    one_hots: Frame = needs(one_hots),
    cpu_parts: Maybe[Frame] = maybe(cpu_parts),
    cpu_work: Maybe[Frame] = maybe(cpu_work),
    job: Job = needs(JOB),
) -> Estimate:
    if one_hots.empty:
        return nothing("no one-hot rows are multiplied by a matrix")
    return Estimate(
        gone_ns=gains(one_hots, cpu_parts, cpu_work, settings.on_cpu(job)),
        noise_of=("computation",),
        loses="would be saved by an embedding instead of one-hot rows",
    )


def explain(
    estimate: Estimate, one_hots: Frame = needs(one_hots), mean_step_ns: float = needs(mean_step_ns)
) -> Explanation:
    mine = estimate.rows(one_hots)
    times = float(mine.loc[mine["passes"] == "forward", "calls"].sum())
    return Explanation(
        title="One-hot rows are multiplied by a matrix",
        summary=f"Rank {estimate.worst} multiplies one-hot rows by a matrix {often(times)} a step, which takes"
        f" {duration(mine['ns'].sum())} of the {duration(mean_step_ns)} step. An embedding reads only the rows needed.",
        changes=(_EMBEDDING,),
        evidence=table(f"Products of one-hot rows, a step of rank {estimate.worst}", mine, _COLUMNS),
        sure="Estimated from the bytes that an embedding moves compared with the product.",
    )


RULE = Rule("One-hot rows multiplied", check, explain, saves_from=("computation", "host", "launch_latency"))
