"""Attention writes its scores to memory, where a fused kernel would keep them on the chip.

Scores of s queries and t keys are s × t numbers a head. Computed by a product, a softmax and another product, they are
written and read several times, scaled, masked and dropped out in passes of their own, and kept for the backward pass.
PyTorch's `scaled_dot_product_attention` has kernels that never write them (FlashAttention, Dao et al. 2022).

Needs a trace of a GPU. Attention is known by its operators: a softmax whose nearest products on its thread are batched
ones (`bmm`, `baddbmm`), before it and after, forward and backward; where the trace tells shapes, what the first makes
must be what the second takes. Sequences below 128 are left out, and code that torch.compile generated is not seen.

Saving: the time of these kernels, from the first product to the last, less what a fused kernel takes: the arithmetic of
two products, backward of five, and moving queries, keys, values and the result, each at that share of the device's peak
that the FlashAttention in the job's torch reaches at the least: half on Ampere and Ada, 35 % on Hopper, else a quarter.
It is bounded by what the host could launch sooner. It needs the shapes (`record_shapes=True`, or a recording of
dlprof's, which counts one step's), and 16 bits on a device whose peaks are known and for which PyTorch brings
FlashAttention (from compute capability 8 on; AMD's CDNA).

What to change: `torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal)` in place of
the products and the softmax; in `transformers` `attn_implementation="sdpa"`, of `nn.MultiheadAttention`
`need_weights=False`. What it cannot express (a function of the scores) `torch.nn.attention.flex_attention` can. The
scores' memory is free then, too.
"""

from __future__ import annotations

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.engine import Job, Maybe, by_rank
from dlprof.analysis.estimate import LEAST_SHARE, Estimate, Explanation, Rule, change, nothing, worst
from dlprof.analysis.step.breakdown import part_noise
from dlprof.analysis.step.savings import saving
from dlprof.errors import NotMeasured
from dlprof.result import Change, Panel
from dlprof.units import digits, duration, percent

MOST_ROWS = 12

# What scaled_dot_product_attention does between the products itself: scaling, a mask that is added or filled in,
# dropout, and changes of type and layout around them. Anything else is a function of the scores of the script's own.
_EXPRESSIBLE = {
    *("bmm", "baddbmm", "mul", "div", "add", "sub", "masked_fill", "masked_fill_", "where", "_softmax", "copy_"),
    *("_softmax_backward_data", "native_dropout", "native_dropout_backward", "bernoulli_", "mul_", "div_", "add_"),
    *("fill_", "zero_", "tril", "triu", "bitwise_not", "logical_not", "eq", "ne", "lt", "le", "gt", "ge", "any", "sum"),
    *("arange", "bitwise_and", "logical_and", "_scaled_dot_product_attention_math", "_to_copy", "clone", "cat", "neg"),
}

_ASK_WHY = change(
    "`scaled_dot_product_attention` found no fused kernel: `with torch.nn.attention.sdpa_kernel("
    "SDPBackend.FLASH_ATTENTION):` around it says why (a type, a mask's shape or gradient, a head's width)"
)

_IN_LIBRARIES = change(
    'in `transformers` `attn_implementation="sdpa"`; of `nn.MultiheadAttention` `need_weights=False`',
    attn_implementation=(None, "sdpa"),
    need_weights=(None, False),
)


def check(
    attention: Maybe[pd.DataFrame],
    mean_step_ns: Maybe[float],
    own_time: Maybe[pd.DataFrame],
    breakdown: Maybe[pd.DataFrame],
    job: Job,
) -> Estimate:
    """Estimate what fused kernels would save of the attention whose scores lie in memory."""
    if settings.on_cpu(job):
        raise NotMeasured("the job trains on the CPU, where what fused attention takes was not measured")
    frame = attention.get()
    if not len(frame):
        return nothing("no attention of long sequences keeps its scores in memory")
    took = by_rank(frame, "ns")
    unknown = _unknown(frame)
    if unknown:
        share = took[worst(took)] / mean_step_ns.get()
        told = f"attention that keeps its scores in memory takes {percent(share)} of the step"
        if share >= LEAST_SHARE:
            raise NotMeasured(f"{told}; {unknown}")
        return Estimate(saving_ns=saving(own_time.get(), took), by_rank_ns=took, summary=told)
    saved = by_rank(frame.assign(saved_ns=(frame["ns"] - frame["fused_ns"]).clip(lower=0.0)), "saved_ns")
    most = frame.groupby("rank")["most_ns"].first()
    saved = {rank: min(ns, float(most[rank])) for rank, ns in saved.items()}
    return Estimate(
        saving_ns=saving(own_time.get(), saved),
        by_rank_ns=saved,
        noise_ns=part_noise(breakdown.get(), "computation"),
        loses="would be saved by fused attention",
        explain=lambda: _explain(mean_step_ns.get(), frame[frame["rank"] == worst(took)], took[worst(took)]),
    )


def _unknown(frame: pd.DataFrame) -> str:
    """Say why nobody knows what fused kernels would take; "": it is known."""
    if (frame["shape"] == "").any():
        return "its shapes were neither traced (record_shapes=True) nor counted"
    if frame["fused_ns"].isna().any():
        return f"how fast it is fused on this device, in {frame['dtype'].iloc[0]}, is not known"
    return ""


def _explain(mean_step_ns: float, mine: pd.DataFrame, took: float) -> Explanation:
    mine = mine.sort_values("ns", ascending=False, kind="stable")
    first, rank = mine.iloc[0], int(mine["rank"].iloc[0])
    told = ("passes", "shape", "dtype", "calls", "ns", "fused_ns")
    columns = ("pass", "queries, values (batch × heads, length, width)", "type", "times", "takes_ns")
    return Explanation(
        title="Attention keeps its scores in memory",
        summary=f"Rank {rank} computes attention by products and a softmax {digits(float(mine['calls'].sum()))} times"
        f" a step, for {duration(took)} of {duration(mean_step_ns)}; most of it has the shapes {first['shape']}.",
        changes=_changes(" ".join(mine["between"]).split(), bool(mine["math"].any())),
        evidence=Panel(
            "table",
            f"Attention with its scores in memory, a step of rank {rank}",
            tuple(tuple(row[c] for c in told) for row in mine.head(MOST_ROWS).to_dict("records")),
            (*columns, "fused, at most_ns"),
        ),
        sure=f"Estimated: fused kernels at {percent(float(first['share']))} of the device's peak, which well-made ones"
        " exceed, and the masked half of causal attention computed.",
    )


def _changes(between: list[str], is_math: bool) -> tuple[Change, ...]:
    """Say what to call, and what stands in the way as far as the operators between the products tell."""
    names = {name.removeprefix("aten::") for name in between}
    own = sorted(names - _EXPRESSIBLE)
    if is_math:
        return (_ASK_WHY,)
    if own:
        stands = f"between the products stands {', '.join(own[:4])}, which `scaled_dot_product_attention` does not do"
        return (change(f"`torch.nn.attention.flex_attention`, compiled: {stands}"),)
    masked = names & {"masked_fill", "masked_fill_", "where", "baddbmm", "add", "add_"}
    dropped = names & {"native_dropout", "bernoulli_"}
    more = (", is_causal=True or attn_mask=…" if masked else "") + (", dropout_p=…" if dropped else "")
    call = f"`torch.nn.functional.scaled_dot_product_attention(q, k, v{more})`"
    return change(f"{call} in place of the products and the softmax"), _IN_LIBRARIES


RULE = Rule(
    "unfused_attention",
    "Attention in memory",
    check,
    saves_from=("computation",),
)
