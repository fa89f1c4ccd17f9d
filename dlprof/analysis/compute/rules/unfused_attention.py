"""Attention writes its scores to memory, where a fused kernel would keep them on the chip.

Attention of s queries and t keys has s × t scores per head. A product, a softmax and a second product write and read
them several times, scale, mask and drop them in separate passes, and keep them for the backward pass. The fused kernels
of PyTorch's `scaled_dot_product_attention` never write them (FlashAttention, Dao et al. 2022).

Needs a trace. The rule looks for a softmax between two batched products (`bmm`, `baddbmm`) on one thread, forward and
backward; where shapes are known, the output of the first product must be the input of the second. Sequences shorter
than 128 and code from torch.compile do not count.

Saving: the time of the kernels from the first product to the last, less that of a fused kernel. A fused kernel computes
two products forward and five backward and moves queries, keys, values and the result, each at the share of the device's
peak that FlashAttention reaches at least: half on Ampere and Ada, 35 % on Hopper, a quarter elsewhere. The saving is
limited by how fast the host can launch. This needs shapes (`record_shapes=True`, or a recording by dlprof), 16-bit
types, and a device with known peaks that FlashAttention supports (compute capability 8 or later; AMD CDNA). On a CPU a
fused kernel takes 15 % longer than the products alone, by measurement, and there is none with dropout. Where the masks
of the counted step leave less than 40 % of the scores, as windows do: at most the share of all this that is masked.

What to change: `torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal)`;
`attn_implementation="sdpa"` in `transformers`; `need_weights=False` for `nn.MultiheadAttention`. For a function of the
scores that it cannot express: `torch.nn.attention.flex_attention`. Where most scores are masked, attention in blocks.
Where the script calls it already and PyTorch fell back to the "math" implementation, the finding names the known
reasons: the type, the head's width, a mask. The change also frees the memory of the scores.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dlprof.analysis import settings
from dlprof.analysis.compute.attention import WIDEST, attention
from dlprof.analysis.compute.cpu_work import cpu_parts, cpu_work, in_all_steps
from dlprof.analysis.compute.products import sizes
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, by_rank, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing, worst
from dlprof.analysis.panel import table
from dlprof.analysis.source.statements import Trees, statements, telling
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.result import Change
from dlprof.units import duration, often, percent

MOST_ROWS = 12

_COLUMNS = {
    "passes": "pass",
    "shape": "queries, values (batch × heads, length, width)",
    "dtype": "type",
    "calls": "times",
    "ns": "takes_ns",
    "fused_ns": "fused, at most_ns",
}

# What scaled_dot_product_attention can do between the products: scale, mask (added or filled in), drop out, and change
# type and layout. Anything else is the script's own function of the scores.
_EXPRESSIBLE = {
    *("bmm", "baddbmm", "mul", "div", "add", "sub", "masked_fill", "masked_fill_", "where", "_softmax", "copy_"),
    *("_softmax_backward_data", "native_dropout", "native_dropout_backward", "bernoulli_", "mul_", "div_", "add_"),
    *("fill_", "zero_", "tril", "triu", "bitwise_not", "logical_not", "eq", "ne", "lt", "le", "gt", "ge", "any", "sum"),
    *("softmax", "matmul", "dropout", "feature_dropout", "ones", "zeros", "full", "scalar_tensor", "einsum", "rsub"),
    # These change shapes and layouts alone, or get memory.
    *(
        "view",
        "_unsafe_view",
        "reshape",
        "_reshape_alias",
        "expand",
        "as_strided",
        "alias",
        "transpose",
        "permute",
        "t",
    ),
    *("contiguous", "unsqueeze", "squeeze", "slice", "select", "narrow", "split", "detach", "resolve_conj", "to"),
    *("resolve_neg", "empty", "empty_like", "empty_strided", "new_empty", "new_zeros", "zeros_like", "ones_like"),
    *("full_like", "lift_fresh", "type_as", "expand_as", "view_as", "result_type", "unbind", "chunk", "numpy_T", "mT"),
    *("arange", "bitwise_and", "logical_and", "_scaled_dot_product_attention_math", "_to_copy", "clone", "cat", "neg"),
}

_ASK_WHY = "`with torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION):` around it says why"

# Libraries whose attention is fused where it is asked for: how, and the classes that take it.
_ASKED_FOR = {
    "x_transformers": (
        change("`attn_flash=True` where x-transformers' layers are made: it is False by default"),
        ("Decoder", "Encoder", "AttentionLayers"),
    ),
}

_IN_LIBRARIES = change(
    'or `attn_implementation="sdpa"` in `transformers`; `need_weights=False` for `nn.MultiheadAttention`',
    attn_implementation=(None, "sdpa"),
    need_weights=(None, False),
)

# How models of transformers are named; older recordings do not say how one computes attention.
_OF_TRANSFORMERS = (
    *("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForPreTraining", "ForConditionalGeneration", "ForMultipleChoice"),
    *("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForImageClassification"),
)


def check(
    attention: Frame = needs(attention),
    cpu_parts: Maybe[Frame] = maybe(cpu_parts),
    cpu_work: Maybe[Frame] = maybe(cpu_work),
    mean_step_ns: float = needs(mean_step_ns),
    job: Job = needs(JOB),
) -> Estimate:
    frame = attention
    if frame.empty:
        return nothing("no attention over long sequences keeps its scores in memory")
    took, unknown = by_rank(frame, "ns"), ""
    rank = worst(took)
    if (frame["shape"] == "").any():
        unknown = "its shapes were neither traced (`--shapes`, or record_shapes=True) nor counted"
    elif frame["fused_ns"].isna().any():
        unknown = f"how fast a fused kernel is on this device in {frame['dtype'].iloc[0]} is not known"
    needless = 1 - _left(job, rank)
    unknown = "" if needless else unknown
    fused_ns = (frame["ns"] - frame["fused_ns"]).clip(lower=0.0)
    saved = by_rank(frame.assign(saved_ns=np.fmax(fused_ns, needless * frame["ns"])), "saved_ns")
    most = frame.groupby("rank")["most_ns"].first()
    saved = {rank: ns if needless else min(ns, float(most[rank])) for rank, ns in saved.items()}
    if settings.on_cpu(job):
        took, saved = (in_all_steps(ns, cpu_parts.get(), cpu_work.get()) for ns in (took, saved))
    takes = f"attention that keeps its scores in memory takes {percent(took[rank] / mean_step_ns)} of the step"
    return Estimate(
        gone_ns=took if unknown else saved,
        noise_of=("computation",),
        loses="would be saved by attention that computes no masked score, at most"
        if needless
        else "would be saved by fused attention",
        summary=takes if unknown else "",
        unknown=unknown,
        seen=rank,
    )


def explain(
    estimate: Estimate,
    attention: Frame = needs(attention),
    mean_step_ns: float = needs(mean_step_ns),
    statements: Trees = needs(statements),
    job: Job = needs(JOB),
) -> Explanation:
    rank = estimate.seen
    calls = [one for one in job.facts[rank].get("calls") or () if one.get("kind") == "softmax"]
    asked = [of for name, of in _ASKED_FOR.items() if any(f"({name}/" in (one.get("via") or "") for one in calls)]
    left = _left(job, rank)
    mine = attention[attention["rank"] == rank].sort_values("ns", ascending=False, kind="stable")
    return Explanation(
        title="Attention is not fused: it writes its scores to memory",
        summary=f"Rank {rank} computes attention with two products and a softmax"
        f" {often(float(mine['calls'].sum()))} a step, which takes {duration(mine['ns'].sum())} of the"
        f" {duration(mean_step_ns)} step. Most of it is for queries and values of"
        f" {' and '.join(mine['shape'].iloc[0].split())}.",
        changes=(*_in_blocks(left), *(of for of, _ in asked), *_changes(mine, settings.model(job))),
        where=tuple(place for _, classes in asked for place in telling(statements, classes)),
        at_most=left < 1,
        evidence=table(f"Attention with its scores in memory, a step of rank {rank}", mine, _COLUMNS, MOST_ROWS),
        sure="At most: the time of all of it, by the share of the scores that is masked."
        if left < 1
        else "Estimated from the time of the products: the ratio was measured on a CPU."
        if settings.on_cpu(job)
        else f"Estimated for fused kernels at {percent(mine['share'].iloc[0])} of the device's peak, which good kernels"
        " exceed, and without skipping the masked half of causal attention.",
    )


def _left(job: Job, rank: int) -> float:
    """Return the share of scores that the masks of a rank leave, 1 where most are left, or that is not known."""
    flows = (job.facts[rank].get("flops") or {}).get("flows") or []
    return max((float(one["used"]) for one in flows if one.get("kind") == "masked"), default=1.0)


def _in_blocks(left: float) -> tuple[Change, ...]:
    """Return what computes no score that is masked, where most of them are."""
    if left == 1:
        return ()
    return (
        change(
            f"skip the scores that are masked, {percent(1 - left)} of all: for a window, multiply each block of queries"
            " by its own block of keys and the one before (`view` of the sequence as blocks), masked within; or"
            " `torch.nn.attention.flex_attention`, compiled, with a block mask"
        ),
    )


def _changes(mine: Frame, model: settings.Settings) -> tuple[Change, ...]:
    """Name the function to call, or the known reason why it is not fused."""
    now, named = model.get("attention"), str(model.get("class"))
    if now == "eager" or (now is None and named.endswith(_OF_TRANSFORMERS) and not mine["math"].any()):
        text = f'`attn_implementation="sdpa"` where {named} is made (`from_pretrained` and `from_config` take it)'
        return (change(f"{text}: is {now}" if now else text, attn_implementation=(now, "sdpa")),)
    # On a CPU modules and nodes of the backward pass stand there, too.
    operators = {name for name in " ".join(mine["between"]).split() if "::" in name}
    names = {name.removeprefix("aten::") for name in operators if not name.startswith("autograd::")}
    own = sorted(names - _EXPRESSIBLE)
    if mine["math"].any():
        why = "; ".join(_prevented(mine["dtype"].iloc[0], mine["shape"].iloc[0], names))
        return (change(f"`scaled_dot_product_attention` found no fused kernel{f': {why}' if why else ''}. {_ASK_WHY}"),)
    if own:
        reason = f"`scaled_dot_product_attention` has no {', '.join(own[:4])} between the products"
        return (change(f"`torch.nn.attention.flex_attention`, compiled: {reason}"),)
    masked = names & {"masked_fill", "masked_fill_", "where", "baddbmm", "add", "add_"}
    dropped = names & {"native_dropout", "bernoulli_"}
    more = (", is_causal=True or attn_mask=…" if masked else "") + (", dropout_p=…" if dropped else "")
    call = f"`torch.nn.functional.scaled_dot_product_attention(q, k, v{more})`"
    return change(f"{call} instead of the products and the softmax"), _IN_LIBRARIES


def _prevented(dtype: str, shape: str, names: set[str]) -> Iterator[str]:
    """Yield what of an attention is known to leave PyTorch without a fused kernel for it."""
    if dtype == "float64":
        yield "none takes float64"
    if shape:
        width = max(sizes(shape)[0][-1], sizes(shape)[1][-1])
        if width > WIDEST:
            yield f"a head is {width} wide, of which FlashAttention takes {WIDEST} at most"
        elif width % 8:
            yield f"a head is {width} wide, which is no multiple of 8"
    if names & {"native_dropout", "bernoulli_"}:
        yield "dropout, with which a CPU has none"
    if names & {"add", "add_", "masked_fill", "masked_fill_", "where"}:
        yield "a mask, which FlashAttention takes as is_causal=True only, and others without a gradient of its own"


RULE = Rule("Attention in memory", check, explain, saves_from=("computation",))
