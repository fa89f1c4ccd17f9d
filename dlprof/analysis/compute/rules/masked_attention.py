"""Attention is given a mask as a tensor, with which PyTorch has no flash attention, and no masked score is skipped.

`scaled_dot_product_attention` with an `attn_mask` runs in its memory-efficient kernels or in those of cuDNN. These read
the mask and compute all scores, also the half that a causal mask throws away. FlashAttention takes no mask: said to be
causal, it computes only what is not masked.

Needs a trace of a GPU, and the shapes of attention, of the step whose FLOPs are counted (`--flops`), and a line of the
script that calls it: a library's model may need its mask. Left alone are sequences shorter than 128, and what
FlashAttention does not take: types of other than 16 bits, and heads wider than 256.

Saving: the time of these kernels and of what converts the mask, less what FlashAttention takes of as many scores, half
of them where there are as many queries as keys, at the share of the device's peak that it reaches at least: half on
Ampere and Ada, 35 % on Hopper, a quarter elsewhere. It is a bound where the script's files do not show that the mask is
causal: others leave more scores, or fewer.

What to change: `torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)` instead of a causal mask,
which gives the same but for rounding. Padding at the end needs no mask beside it: no other token sees it, and the loss
leaves it out. For other masks there is `torch.nn.attention.flex_attention`, compiled, with a block mask, which skips
what is masked; for sequences of several lengths, `torch.nn.attention.varlen`.
"""

from __future__ import annotations

from dlprof.analysis.compute.attention import TAKES_MASK, masked_attention
from dlprof.analysis.engine import JOB, Frame, Job, by_rank, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.panel import table
from dlprof.analysis.source.statements import Trees, causal_masks, statements
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.result import Place
from dlprof.units import duration, often, percent

_COLUMNS = {
    "operator": "operator",
    "shape": "queries, keys, values, mask",
    "dtype": "type",
    "calls": "times",
    "ns": "takes_ns",
    "flash_ns": "as flash attention_ns",
}
_OTHERS = (
    "where the mask is causal, `scaled_dot_product_attention(q, k, v, is_causal=True)` instead of it: flash attention"
    " takes no mask. For others `torch.nn.attention.flex_attention`, compiled, with a block mask; for sequences of"
    " several lengths `torch.nn.attention.varlen`"
)


def check(
    masked_attention: Frame = needs(masked_attention),
    mean_step_ns: float = needs(mean_step_ns),
    job: Job = needs(JOB),
) -> Estimate:
    frame = masked_attention
    if frame.empty:
        return nothing("no long attention takes a mask as a tensor")
    if not any(_calls(job, int(rank)) for rank in frame["rank"].unique()):
        return nothing("a library's model gives its attention a mask, and whether it needs it is not known")
    gains = (frame["ns"] - frame["flash_ns"]).clip(lower=0.0)
    most = frame.groupby("rank")["most_ns"].first()
    saved = {rank: min(ns, float(most[rank])) for rank, ns in by_rank(frame.assign(gain_ns=gains), "gain_ns").items()}
    took, unknown = by_rank(frame, "ns"), bool(frame["flash_ns"].isna().any())
    return Estimate(
        gone_ns=took if unknown else saved,
        noise_of=("computation",),
        loses="would be saved by attention that skips what is masked",
        summary=f"attention with a mask takes {percent(max(took.values()) / mean_step_ns)} of the step"
        if unknown
        else "",
        unknown="how fast flash attention is on this device is not known" if unknown else "",
    )


def explain(
    estimate: Estimate,
    masked_attention: Frame = needs(masked_attention),
    statements: Trees = needs(statements),
    mean_step_ns: float = needs(mean_step_ns),
    job: Job = needs(JOB),
) -> Explanation:
    mine = estimate.rows(masked_attention)
    where = _calls(job, estimate.worst)
    masks = [causal_masks(statements, place.file, place.line) for place in where]
    causal = bool(masks) and all(masks) and bool(mine["causal"].all())
    made = tuple(dict.fromkeys(place for places in masks for place in places)) if causal else ()
    at = f" ({made[0].file}:{made[0].line})" if made else ""
    text = f"`scaled_dot_product_attention(q, k, v, is_causal=True)` instead of the mask, which is causal{at}"
    return Explanation(
        title="Attention takes a mask as a tensor, and so is no flash attention",
        summary=f"Rank {estimate.worst} computes attention with a mask {often(float(mine['calls'].sum()))} a step,"
        f" which takes {duration(mine['ns'].sum())} of the {duration(mean_step_ns)} step. Flash attention"
        f"{' of the half that is not masked' if mine['causal'].all() else ''} would take"
        f" {duration(mine['flash_ns'].sum())}.",
        changes=(change(text if causal else _OTHERS),),
        evidence=table(f"Attention with a mask, a step of rank {estimate.worst}", mine, _COLUMNS),
        sure=f"Estimated for flash attention at {percent(mine['share'].iloc[0])} of the device's peak, which good"
        " kernels exceed." + ("" if causal else " Whether the mask is causal is not known: a bound, for one that is."),
        at_most=not causal,
        where=(*where, *made),
    )


def _calls(job: Job, rank: int) -> list[Place]:
    """Return the script's own calls of attention with a mask; none where a library calls it."""
    lines = (job.facts[rank].get("flops") or {}).get("lines") or ()
    called = [one for one in lines if set(TAKES_MASK) & set(one.get("operators") or ())]
    return [
        Place(str(one["file"]), int(one["line"]), str(one["function"]), what=str(one["source"]))
        for one in called
        if "attention" in str(one["source"])
    ]


RULE = Rule("Attention with a mask", check, explain, saves_from=("computation",), only_with="gpu")
