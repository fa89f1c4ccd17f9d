"""A product computes what is not used, or what another order of the same operators need not compute.

Scores of all tokens, of which the loss counts a few (`ignore_index`), or an index picks them: the rest is computed for
nothing, and a large vocabulary makes it the largest product of the step. One-hot rows that `scatter_` has written and a
product multiplies: they only select rows of the other matrix (`one_hot_input` sees those of `one_hot`); so do one-hot
rows that are given, as an identity matrix in the place of features, and rows of words that are nearly all zeros. A
convolution over single pixels after an interpolation: it can be exchanged with that, and sees a part of the pixels. A
weight that is put together from factors of low rank for each forward pass (LoRA): a product, a sum and a gradient of
the weight's size. On a CPU a convolution over many taps, where that by FFT is faster, or by a constant kernel that is a
product of lines. Rows that are then multiplied by zero, such as those of experts that a token was not routed to. What
was computed before in the same step, of the same tensors; and what is the same in each step, as nothing that it is made
of changes: features of a fixed picture, a mask, a table of positions.

Needs a step that was counted (`--flops`), in which results are followed to what reads them, and a trace.

Saving: the traced time of these products and of their gradients, by the share that is not needed; of scores in a loss
also that of its softmax; of an interpolation its own by the channels that it need not enlarge. Of what is computed
again, all that its line computes, by the bytes that an operator moves where it is no product. Of convolutions that have
a cheaper form it is a bound: where shapes share the time of an operator, the longest calls are taken to be theirs.

What to change: the order, which gives the same but for rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from dlprof import schema
from dlprof.analysis import settings
from dlprof.analysis.chains.written_out import one_hots
from dlprof.analysis.compute.convolutions import left_of, longest_calls, took
from dlprof.analysis.compute.cpu_work import cpu_parts, cpu_work, in_all_steps
from dlprof.analysis.compute.operators import operator_work, operators
from dlprof.analysis.engine import JOB, RANK, Frame, Job, Maybe, RankFacts, by_rank, maybe, needs, per_rank
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.panel import table
from dlprof.analysis.source.line_work import OperatorPasses, operator_passes
from dlprof.analysis.step.breakdown import breakdown, part, part_least, part_noise
from dlprof.analysis.timeline.steps import Timing, mean_step_ns, timing
from dlprof.errors import NotMeasured
from dlprof.result import Place
from dlprof.units import duration, percent

# By kind: what the line does, and the remedy. Of "unused_rows" another one where a loss counts few of the rows.
_IN_A_LOSS, _TIMES_ZERO = "in_a_loss", "times_zero"
_LONG_KERNEL, _SEPARABLE = "long_kernel", "separable"
_KINDS: Mapping[str, tuple[str, str]] = {
    "unused_rows": (
        "multiplies, and {} of the result is used",
        "index before this product: multiply only the rows, or by only the columns, that are kept",
    ),
    _IN_A_LOSS: (
        "computes scores of which the loss counts {}",
        "take the rows that the loss counts before this product (`keep = labels != -100`, then the head of"
        " `hidden[keep]`, and the loss of `labels[keep]`)",
    ),
    _TIMES_ZERO: (
        "computes rows of which all but {} are then multiplied by zero",
        "multiply only the rows whose weight is not zero: of each expert those routed to it"
        " (`rows = weight.nonzero()`, then `out.index_add_(0, rows, …)` of what it makes of `x[rows]`)",
    ),
    "repeated": (
        "computes what was computed before in the same step, of the same tensors",
        "compute it once in a step, and hand the result on",
    ),
    "constant": (
        "computes the same in every step, as nothing that it is made of changes",
        "compute it once, before training, and keep the result",
    ),
    "low_rank": (
        "multiplies by a weight that is put together from factors of low rank each time",
        "apply the factors to the input one after the other, `base(x) + scale * (x @ A.T) @ B.T`: then neither the sum"
        " nor its gradient is made",
    ),
    "one_hot": (
        "multiplies one-hot rows, which only selects rows of the other matrix",
        "`torch.nn.functional.embedding(index, weight)`, or `weight[index]`; to count them, `torch.bincount`",
    ),
    "one_hot_given": (
        "multiplies one-hot rows, as an identity matrix has, which only selects rows",
        "`torch.nn.functional.embedding(index, weight)`, or `weight[index]`; where each row has a number of its own,"
        " the weight itself",
    ),
    "sparse": (
        "multiplies rows of which {} at most is not zero",
        "keep what stays, as an adjacency, sparse: `torch.sparse.mm` of `matrix.to_sparse_csr()`, made once; of rows"
        " that change, `torch.nn.functional.embedding_bag` of the places that are not zero (`per_sample_weights` for"
        " their values)",
    ),
    _LONG_KERNEL: (
        "convolves directly with a kernel of {taps} taps",
        "convolve by FFT: `torch.fft.irfft(torch.fft.rfft(x, n) * torch.fft.rfft(kernel, n), n)` with `n` at least the"
        " sum of both lengths, of a kernel that is turned around (`kernel.flip(-1)`), summed over the input channels"
        " between the two where there are several; or `torchaudio.functional.fftconvolve`",
    ),
    _SEPARABLE: (
        "convolves with a constant kernel of {taps} taps that is a product of lines, as a box or a Gaussian is",
        "convolve by one line after the other, as the kernel is separable: with one of `1 x k`, and the result with"
        " another one of `k x 1`",
    ),
    "upsampled": (
        "convolves single pixels of what was made larger before",
        "convolve first, and interpolate the result, which has fewer channels: both can be exchanged",
    ),
}
# Of a convolution, which another form of may be cheaper: what is saved is a bound.
_FORMS = (_LONG_KERNEL, _SEPARABLE)
# By how much longer a value takes in an operator that gathers it than in a product of matrices.
_GATHERED = 10.0
_SOFTMAX = ("aten::_log_softmax", "aten::nll_loss")
_COLUMNS = {
    "line": "line",
    "source": "source",
    "operator": "operator",
    "shape": "shape",
    "calls": "times a step",
    "used": "used",
    "gone_ns": "needless_ns",
}


@per_rank
def needless_products(
    operators: Frame = needs(operators),
    operator_work: Frame = needs(operator_work),
    spans: Frame = needs(schema.SPANS),
    timing: Timing = needs(timing),
    operator_passes: Maybe[OperatorPasses] = maybe(operator_passes),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return the products of a traced step that need not be so large, a row for each line, operator and shape.

    kind (of `_KINDS`), file, line, function, source, operator, shape, calls, used (a share; NaN: all of it), gone_ns.
    Raises NotMeasured where results were not followed.
    """
    flops = rank.facts.get("flops") or {}
    if not isinstance(flows := flops.get("flows"), list):
        raise NotMeasured("no step was counted in which results are followed (--flops on)")
    passes = 3 if flops.get("backward") else 1
    moved = {str(one["operator"]): float(one["bytes"]) for one in flops.get("moved") or ()}
    rows = [
        _row(one, operators, moved, passes, operator_passes.or_none())
        for one in flows
        if one.get("kind") in {*_KINDS} - {*_FORMS}
    ]
    if forms := [one for one in flows if one.get("kind") in _FORMS]:
        longest = longest_calls(operator_work, spans, len(timing.windows))
        rows += [row for one in forms if (row := _convolution(one, operators, longest))["gone_ns"] > 0]
    names = ["kind", "file", "line", "function", *_COLUMNS]
    return pd.DataFrame(rows, columns=list(dict.fromkeys(names)))


def _row(
    flow: Mapping[str, Any],
    operators: pd.DataFrame,
    moved: Mapping[str, float],
    passes: int,
    known: OperatorPasses | None,
) -> dict[str, Any]:
    kind, used = str(flow["kind"]), float(flow["used"])
    ns = _took(operators, str(flow["shape"]), int(flow["calls"]))
    factors = flow.get("factors") or ["", ""]
    if kind == "unused_rows":
        gone = passes * ns * (1 - used)
        if str(flow.get("read_by")).startswith("aten::nll_loss"):
            kind = _IN_A_LOSS
            alone = float(operators.loc[operators["operator"].str.startswith(_SOFTMAX), "ns"].sum())
            gone += (1 - used) * (alone if known is None else known.named(_SOFTMAX, trains=passes > 1))
        elif flow.get("read_by") == "aten::mul":
            kind = _TIMES_ZERO
    elif kind in ("repeated", "constant"):
        trains = bool(flow.get("trains")) and passes > 1
        gone = (passes if trains else 1) * ns
        # Where it has a gradient, and the trace does not say whose that is, it takes as long.
        left = (1 + trains) * _moving(flow, operators, moved, 1)
        gone += left if known is None else known.of(flow.get("moved") or {}, trains=trains)
        used = float("nan")
    elif kind == "low_rank":  # the gradient of the weight takes what the forward pass does
        gone = ns * (passes > 1) + passes * _took(operators, str(factors[1]), int(flow["calls"]))
        gone += _moving(flow, operators, moved, int(flow["calls"]))
        used = float("nan")
    elif kind == "one_hot":  # no gradient is made of the rows
        gone, used = ns * min(passes, 2), float("nan")
        gone += float(operators.loc[operators["operator"] == "aten::scatter_", "ns"].sum())
    elif kind in ("one_hot_given", "sparse"):
        # What is gathered takes some times as long a value as what a product multiplies.
        gone = ns * min(passes, 2) * max(1 - _GATHERED * used, 0.0)
        used = used if kind == "sparse" else float("nan")
    else:
        enlarges = operators["operator"].str.startswith(str(factors[0]))
        gone = float(operators.loc[enlarges, "ns"].sum()) * (1 - used) + passes * ns * (1 - 1 / float(flow["times"]))
        used = float("nan")
    return {**flow, "kind": kind, "used": used, "gone_ns": gone}


def _convolution(flow: Mapping[str, Any], operators: pd.DataFrame, longest: pd.Series[float]) -> dict[str, Any]:
    """Return the row of a convolution that may have a cheaper form: nothing is gone where that is not faster."""
    kind, shape, calls = str(flow["kind"]), str(flow["shape"]), int(flow["calls"])
    ns = took(operators, shape, calls, longest)
    gone = ns * max(1 - left_of(kind, shape, ns / calls, float(flow.get("flops") or 0.0) / calls), 0.0)
    return {**flow, "used": float("nan"), "gone_ns": gone}


def _moving(flow: Mapping[str, Any], operators: pd.DataFrame, moved: Mapping[str, float], calls: int) -> float:
    """Return what the operators that move bytes for it take, by their share of what such operators move."""
    gone = 0.0
    for name, size in (flow.get("moved") or {}).items():
        share = min(float(size) * calls / max(moved.get(name, 0.0), 1.0), 1.0)
        gone += share * float(operators.loc[operators["operator"] == name, "ns"].sum())
    return gone


def _took(operators: pd.DataFrame, shape: str, calls: int) -> float:
    """Return what so many products of operands of these shapes take; without a shape there are none."""
    mine = operators[(operators["shape"] == shape) & (operators["calls"] > 0) & (shape != "")]
    return 0.0 if mine.empty else float(mine["ns"].iloc[0] / mine["calls"].iloc[0]) * min(calls, mine["calls"].iloc[0])


def check(
    needless_products: Frame = needs(needless_products),
    one_hots: Maybe[Frame] = maybe(one_hots),
    cpu_parts: Maybe[Frame] = maybe(cpu_parts),
    cpu_work: Maybe[Frame] = maybe(cpu_work),
    breakdown: Maybe[Frame] = maybe(breakdown),
    job: Job = needs(JOB),
) -> Estimate:
    if (known := one_hots.or_none()) is not None and len(known):  # `one_hot_input` has them
        needless_products = needless_products[needless_products["kind"] != "one_hot"]
    if needless_products.empty:
        return nothing("all that is multiplied is used, as far as results were followed")
    gone = by_rank(needless_products.groupby("rank", as_index=False)[["gone_ns"]].sum(), "gone_ns")
    if settings.on_cpu(job):
        gone = in_all_steps(gone, cpu_parts.get(), cpu_work.get())
    noise = least = 0.0
    if breakdown.or_none() is not None:  # what the traced steps differ by holds for each part of their computation
        computing = max(part(breakdown.get(), "computation").values(), default=0.0)
        share = min(max(gone.values()) / max(computing, 1.0), 1.0)
        noise = part_noise(breakdown.get(), "computation") * share
        least = part_least(breakdown.get(), "computation") * share
    return Estimate(
        gone_ns=gone,
        noise_ns=noise,
        least_ns=least,
        loses="goes to products that need not be so large",
        seen=needless_products,
    )


def explain(
    estimate: Estimate,
    mean_step_ns: float = needs(mean_step_ns),
) -> Explanation:
    mine = estimate.rows(estimate.seen).sort_values("gone_ns", ascending=False)
    first = mine.iloc[0]
    does = _KINDS[str(first["kind"])][0]
    taps = " x ".join(str(first["shape"]).split(" ")[-1].split("x")[2:])
    does = does.format(percent(float(first["used"])), taps=taps)
    place = Place(str(first["file"]), int(first["line"]), str(first["function"]), what=str(first["source"]))
    kinds = mine["kind"].drop_duplicates().tolist()
    return Explanation(
        title="A product need not be so large",
        summary=f"{first['function']} ({first['file']}:{first['line']}), `{first['source']}`, {does}:"
        f" {duration(float(first['gone_ns']))} of a traced step.",
        changes=tuple(change(_KINDS[kind][1]) for kind in kinds),
        verdict=f"{percent(estimate.saving_ns / mean_step_ns)} of each step goes to needless products:"
        f" {first['function']} ({first['file']}:{first['line']}) {does}.",
        evidence=table(f"Products that need not be so large, a step of rank {estimate.worst}", mine, _COLUMNS),
        where=(place,),
        at_most=str(first["kind"]) in _FORMS,
        sure="Estimated by what these products took in the traced steps; their gradients as long as they.",
    )


RULE = Rule("Needless products", check, explain, saves_from=("computation", "host", "launch_latency"))
