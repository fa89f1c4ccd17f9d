"""One-hot rows are multiplied by a matrix, to pick its rows.

A product of N one-hot rows of V classes and a V × h matrix reads N × V zeros and ones, made as integers and cast, and
adds up as many products, for what `embedding` reads in N rows. Its gradient is another such product.

Needs a trace. It is recognised by its operators: `one_hot` or `scatter_`, a cast, a product at once. With its shapes
(`record_shapes=True`, or dlprof's count of a step) what an embedding takes is known; without them the product is taken
to stay as long as it is, so that what is saved is at least what is said. One-hot targets are for `unfused_loss`; rows
that are concatenated with something else need their product.

Saving: making the one-hot rows, the product and its gradient, less the share of both products that moving the chosen
rows takes.

What to change: `nn.Embedding`, or `torch.nn.functional.embedding(index, weight)` with `weight.t()` of an `nn.Linear`,
in place of `one_hot` and the product.
"""

from __future__ import annotations

from dlprof.analysis import settings
from dlprof.analysis.chains.work import gains
from dlprof.analysis.engine import Frame, Job, Maybe
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.panel import table
from dlprof.units import duration, often

_COLUMNS = {
    "form": "operators",
    "passes": "pass",
    "calls": "times a step",
    "ns": "takes_ns",
    "left_ns": "as an embedding, at most_ns",
}
_EMBEDDING = change(
    "`torch.nn.functional.embedding(index, weight)` in place of `one_hot` and the product; of an `nn.Linear` its"
    " `weight.t()`"
)


def check(one_hots: Frame, cpu_parts: Maybe[Frame], cpu_work: Maybe[Frame], job: Job) -> Estimate:
    if one_hots.empty:
        return nothing("no one-hot rows are multiplied")
    return Estimate(
        gone_ns=gains(one_hots, cpu_parts, cpu_work, settings.on_cpu(job)),
        noise_of=("computation",),
        loses="would be saved by an embedding in place of one-hot rows",
    )


def explain(estimate: Estimate, one_hots: Frame, mean_step_ns: float) -> Explanation:
    mine = estimate.rows(one_hots)
    times = float(mine.loc[mine["passes"] == "forward", "calls"].sum())
    return Explanation(
        title="One-hot rows are multiplied by a matrix",
        summary=f"Rank {estimate.worst} multiplies one-hot rows {often(times)} a step, for"
        f" {duration(mine['ns'].sum())} of {duration(mean_step_ns)}; an embedding reads the rows that it needs.",
        changes=(_EMBEDDING,),
        evidence=table(f"Products of one-hot rows, a step of rank {estimate.worst}", mine, _COLUMNS),
        sure="Estimated by what an embedding moves of what the product does.",
    )


RULE = Rule("One-hot rows multiplied", check, explain, saves_from=("computation", "host", "launch_latency"))
