"""Matrix products in 16 bits have sizes that are no multiple of 8, or in 8 bits none of 16.

Tensor cores read operands in pieces of 16 bytes: 8 numbers of 16 bits, 16 of 8. Where a row of a matrix is no multiple
of that, a library pads, takes a slower kernel, or leaves the tensor cores unused (NVIDIA, Matrix Multiplication
Background User's Guide). The usual cause is a vocabulary or a hidden size that was counted and not chosen.

Needs a trace of a GPU with shapes (`record_shapes=True`), or a recording of dlprof's, which counts one step's; and a
GPU whose peaks are known. Only the sizes of features count, from 16 on: a batch may have any size, a classifier 10
classes and a picture 3 channels.

Saving: each such product as fast as the run's other products of this width are a FLOP; where there are too few of them,
at half of the device's peak. Never less than its bytes take, nor 5 µs.

What to change: pad the vocabulary and the widths to a multiple of 8, better of 64 (`nn.Embedding(50304)` for 50257
words).
"""

from __future__ import annotations

from dlprof.analysis.compute.operators import operators, tensor_cores
from dlprof.analysis.compute.peaks import device_peaks
from dlprof.analysis.compute.products import misaligned_sizes, multiple_of
from dlprof.analysis.engine import JOB, Frame, Job, by_rank, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing, worst
from dlprof.analysis.panel import table
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.errors import NotMeasured
from dlprof.result import Change
from dlprof.units import duration, percent

MOST_ROWS = 12
_MOST_NAMED = 3

_COLUMNS = {"operator": "operator", "shape": "shapes", "dtype": "type", "calls": "times a step", "ns": "takes_ns"}


def check(
    tensor_cores: Frame = needs(tensor_cores), mean_step_ns: float = needs(mean_step_ns), job: Job = needs(JOB)
) -> Estimate:
    if not tensor_cores["aligned"].any():
        if not tensor_cores["tensor_ns"].sum() - tensor_cores["tf32_ns"].sum():
            return nothing("nothing is known to be multiplied in 16 or 8 bits")
        raise NotMeasured("its sizes were neither traced (`--shapes`, or record_shapes=True) nor counted")
    took, unknown = by_rank(tensor_cores, "misaligned_ns"), ""
    rank = worst(took)
    if tensor_cores["misaligned_saved_ns"].isna().any():
        name = device_peaks(job.facts[rank], job.trace_facts[rank])[0] or "this device"
        unknown = f"what good sizes would save is not known: the peaks of {name}, or the products' FLOPs, are missing"
    return Estimate(
        gone_ns=took if unknown else by_rank(tensor_cores, "misaligned_saved_ns"),
        noise_of=("computation",),
        loses="is lost to sizes that do not suit tensor cores",
        summary=f"products of misaligned sizes take {percent(took[rank] / mean_step_ns)} of the step"
        if unknown
        else "",
        unknown=unknown,
        seen=(rank, took[rank]),
    )


def explain(
    estimate: Estimate, operators: Frame = needs(operators), mean_step_ns: float = needs(mean_step_ns)
) -> Explanation:
    rank, took = estimate.seen
    mine = operators[(operators["rank"] == rank) & (operators["shape"] != "")]
    products = zip(mine["operator"], mine["shape"], mine["dtype"], strict=True)
    mine = mine.assign(size=[misaligned_sizes(*product) for product in products])
    odd = mine[mine["size"].str.len() > 0]
    return Explanation(
        title="Products have sizes that do not suit tensor cores",
        summary=f"Products of misaligned sizes take {duration(took)} of a step of {duration(mean_step_ns)} on"
        f" rank {rank}, {duration(estimate.by_rank_ns[rank])} more than they need.",
        changes=(_padded(odd),),
        evidence=table(f"Products of misaligned sizes, rank {rank}", odd, _COLUMNS, MOST_ROWS),
        sure="Estimated by what other products of this run, or of this device, take a FLOP.",
    )


def _padded(odd: Frame) -> Change:
    """Name the sizes whose products take longest, and what to make of them."""
    each = odd.assign(least=odd["dtype"].map(multiple_of)).explode("size")
    named = each.groupby(["size", "least"], sort=False)["ns"].sum().nlargest(_MOST_NAMED).index.tolist()
    better = "; ".join(f"{size} → {-(-size // least) * least} or {-(-size // 64) * 64}" for size, least in named)
    least = max((least for _, least in named), default=8)
    return change(
        f"pad widths and the vocabulary to a multiple of {least}, better of 64{f': {better}' if better else ''}",
        numerics=True,
    )


RULE = Rule("Misaligned sizes", check, explain, saves_from=("computation",), only_with="gpu")
