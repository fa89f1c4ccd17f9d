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

from dlprof.diagnosis import Clear, Rule
from dlprof.engine import Measured
from dlprof.errors import NotMeasured
from dlprof.measures import settings
from dlprof.measures.attention import attention
from dlprof.measures.breakdown import breakdown, part_noise
from dlprof.measures.replay import own_time, saving
from dlprof.result import Finding, Panel
from dlprof.timeline.steps import mean_step_ns, of_step, step_means
from dlprof.units import digits, duration, percent

# A line of code that changes no result but for rounding: worth it from where any finding is (diagnosis.LEAST_SHARE).
NOTABLE_SHARE = 0.02

MOST_ROWS = 12

# What scaled_dot_product_attention does between the products itself: scaling, a mask that is added or filled in,
# dropout, and changes of type and layout around them. Anything else is a function of the scores of the script's own.
_EXPRESSIBLE = {
    *("bmm", "baddbmm", "mul", "div", "add", "sub", "masked_fill", "masked_fill_", "where", "_softmax", "copy_"),
    *("_softmax_backward_data", "native_dropout", "native_dropout_backward", "bernoulli_", "mul_", "div_", "add_"),
    *("fill_", "zero_", "tril", "triu", "bitwise_not", "logical_not", "eq", "ne", "lt", "le", "gt", "ge", "any", "sum"),
    *("arange", "bitwise_and", "logical_and", "_scaled_dot_product_attention_math", "_to_copy", "clone", "cat", "neg"),
}


def check(run: Measured) -> Finding | Clear:
    """Look at the attention whose scores lie in memory, and at what fused kernels would take."""
    if settings.on_cpu(run):
        raise NotMeasured("the job trains on the CPU, where what fused attention takes was not measured")
    frame = run.frame(attention)
    if not len(frame):
        return Clear("no attention of long sequences keeps its scores in memory")
    step = mean_step_ns(run)
    took = {int(str(r)): float(ns) for r, ns in frame.groupby("rank")["ns"].sum().items()}
    worst = max(took, key=lambda r: took[r])
    share = f"attention that keeps its scores in memory takes {percent(took[worst] / step)} of the step"
    if took[worst] / step < NOTABLE_SHARE:
        return Clear(share)
    if (frame["shape"] == "").any():
        raise NotMeasured(f"{share}; its shapes were neither traced (record_shapes=True) nor counted")
    if frame["fused_ns"].isna().any():
        raise NotMeasured(f"{share}; how fast it is fused on this device, in {frame['dtype'].iloc[0]}, is not known")
    frame = frame.assign(saved_ns=(frame["ns"] - frame["fused_ns"]).clip(lower=0.0))
    saved = {
        int(str(r)): min(float(mine["saved_ns"].sum()), float(mine["most_ns"].iloc[0]))
        for r, mine in frame.groupby("rank")
    }
    gain = saving(run, saved)
    if gain / step < NOTABLE_SHARE:
        return Clear(f"{share}; fused it would be {percent(gain / step)} shorter at least")
    mine = frame[frame["rank"] == worst].sort_values("ns", ascending=False, kind="stable")
    first = mine.iloc[0]
    return Finding(
        title="Attention keeps its scores in memory",
        summary=f"Rank {worst} computes attention by products and a softmax {digits(float(mine['calls'].sum()))} times"
        f" a step, for {duration(took[worst])} of {duration(step)}; most of it has the shapes {first['shape']}.",
        verdict=f"{percent(gain / step)} {of_step(run)} would be saved by fused attention.",
        noise_ns=part_noise(run, "computation"),
        saving_ns=gain,
        advice=_advice(" ".join(mine["between"]).split(), bool(mine["math"].any())),
        evidence=Panel(
            "table",
            f"Attention with its scores in memory, a step of rank {worst}",
            tuple(
                (r["passes"], r["shape"], r["dtype"], digits(r["calls"]), duration(r["ns"]), duration(r["fused_ns"]))
                for r in mine.head(MOST_ROWS).to_dict("records")
            ),
            ("pass", "queries, values (batch × heads, length, width)", "type", "times", "takes", "fused, at most"),
        ),
        ranks=tuple(sorted(r for r, ns in saved.items() if ns >= saved[worst] / 2)),
        sure=f"Estimated: fused kernels at {percent(float(mine['share'].iloc[0]))} of the device's peak, which"
        " well-made ones exceed, and the masked half of causal attention computed.",
    )


def _advice(between: list[str], is_math: bool) -> tuple[str, ...]:
    """Say what to call, and what stands in the way as far as the operators between the products tell."""
    names = {name.removeprefix("aten::") for name in between}
    own = sorted(names - _EXPRESSIBLE)
    if is_math:
        return (
            "`scaled_dot_product_attention` found no fused kernel: `with torch.nn.attention.sdpa_kernel("
            "SDPBackend.FLASH_ATTENTION):` around it says why (a type, a mask's shape or gradient, a head's width)",
        )
    if own:
        return (
            f"`torch.nn.attention.flex_attention`, compiled: between the products stands {', '.join(own[:4])}, which"
            " `scaled_dot_product_attention` does not do",
        )
    masked = names & {"masked_fill", "masked_fill_", "where", "baddbmm", "add", "add_"}
    dropped = names & {"native_dropout", "bernoulli_"}
    more = (", is_causal=True or attn_mask=…" if masked else "") + (", dropout_p=…" if dropped else "")
    return (
        f"`torch.nn.functional.scaled_dot_product_attention(q, k, v{more})` in place of the products and the softmax",
        'in `transformers` `attn_implementation="sdpa"`; of `nn.MultiheadAttention` `need_weights=False`',
    )


RULE = Rule(
    "unfused_attention",
    "Attention in memory",
    (attention, breakdown, own_time, step_means),
    check,
    saves_from=("computation",),
)
