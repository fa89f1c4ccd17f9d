"""Attention that keeps its scores in memory: a softmax between two batched products, and what a fused kernel takes.

A fused kernel (FlashAttention, Dao et al. 2022) moves only the queries, keys, values and the result.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import product

import numpy as np
import pandas as pd
from msgspec import Struct
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis import settings
from dlprof.analysis.compute.kernels import kernels, shorter_kernels
from dlprof.analysis.compute.peaks import device_peaks
from dlprof.analysis.compute.products import SIXTEEN_BITS, sizes, width_of
from dlprof.analysis.engine import RANK, Frame, Maybe, RankFacts, maybe, needs, per_rank, within_rank
from dlprof.analysis.host.gaps import SMALL_NS
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import has_device
from dlprof.analysis.timeline.host import is_on_device
from dlprof.analysis.timeline.steps import Timing, timing
from dlprof.errors import NotMeasured

# What a fused kernel reaches of the device's peak arithmetic and memory. FlashAttention 1 reaches 25 to 40 % on an
# A100, FlashAttention 2 50 to 73 % (Dao 2023, FlashAttention-2, abstract), and 35 % on an H100 (Shah et al. 2024): the
# lower ends of these. PyTorch brings the second from 2.2 on for compute capability 8 and later.
FUSED_SHARE = 0.25
_SECOND_IN_TORCH = (2, 2)
_SECOND_SHARES = (
    (re.compile(r"\bG?H(?:20|100|200|800)\b"), 0.35),
    (re.compile(r"\b(?:A\d{1,3}[A-Z]?|L4|L40S?|RTX A\d{4}|RTX \d{4} Ada|RTX [34]0\d0)\b"), 0.5),
)

# FlashAttention works on blocks of 64 or 128 queries and keys; shorter sequences leave most of one empty.
LEAST_LENGTH = 128

# On a CPU a fused kernel takes 1.03 to 1.14 times as long as the two products forward and four backward do, as measured
# with torch 2.13 from 128 to 1,024 places: it computes the scores twice. With dropout PyTorch has none there.
_OF_PRODUCTS_ON_CPU = 1.15
_DROPS = {"aten::native_dropout", "aten::bernoulli_"}

# The products and softmaxes of a thread are read as a text, a letter each.
_BATCHED = ("aten::bmm", "aten::baddbmm")
_LETTERS = {
    **dict.fromkeys(_BATCHED, "b"),
    **dict.fromkeys((f"aten::{name}" for name in ("mm", "addmm", "_scaled_mm", "_grouped_mm", "addmv", "mv")), "o"),
    "aten::_softmax": "s",
    "aten::_softmax_backward_data": "g",
}

# What scaled_dot_product_attention does where none of its fused kernels fits.
_MATH = "aten::_scaled_dot_product_attention_math"

# The fused kernels of it that take a mask as a tensor, which FlashAttention's do not; and the widest head of those.
_SDPA = "aten::scaled_dot_product_attention"
TAKES_MASK = ("aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention")
WIDEST = 256


class Shape(Struct, frozen=True):
    """A batch (with heads) of s queries and t keys of d numbers, and values of e."""

    batch: int
    s: int
    t: int
    d: int
    e: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.s}x{self.d} {self.batch}x{self.t}x{self.e}"


class Block(Struct, frozen=True):
    """One pass of one attention on one thread: the products before and after its softmax, as rows of the spans."""

    passes: str  # "forward" or "backward"
    before: list[int]
    after: list[int]


# A block, the places of its kernels among `kernels` (on a CPU none), the operators in it and around it, and how long it
# takes in the steady steps, ns.
Found = tuple[Block, NDArray[np.int64], set[str], float]


@within_rank
def attention_blocks(
    spans: Frame = needs(schema.SPANS),
    is_on_device: NDArray[np.bool_] = needs(is_on_device),
    has_device: bool = needs(has_device),
    kernels: Maybe[Frame] = maybe(kernels),
    timing: Timing = needs(timing),
) -> list[Found]:
    """Return each attention that keeps its scores.

    A kernel is a block's where its operator begins between the block's first product and its last, on their thread.
    """
    names, lanes, start = spans["name"].array, spans["lane"].cat.codes.to_numpy(), spans["start_ns"].to_numpy()
    end = start + spans["dur_ns"].to_numpy()
    maths = np.flatnonzero(host.is_one_of(spans["name"], _MATH))
    places = owner = np.empty(0, dtype=np.int64)
    if has_device:
        step, owner = (kernels.get()[column].to_numpy() for column in ("step", "owner"))
        places = np.flatnonzero((step >= 0) & (owner >= 0))
        places = places[np.lexsort((start[owner[places]], lanes[owner[places]]))]
        owner = owner[places]
    found: list[Found] = []
    for block in _blocks(spans, is_on_device):
        first, last = block.before[0], block.after[-1]
        lane, begin, done = lanes[first], start[first], end[last]
        if has_device:
            left, right = np.searchsorted(lanes[owner], (lane, lane + 1))
            left, right = left + np.searchsorted(start[owner[left:right]], (begin, done))
            mine, rows = places[left:right], owner[left:right]
            ns = float(kernels.get()["dur_ns"].to_numpy()[mine].sum())
        else:
            mine, rows = places, first + np.flatnonzero(lanes[first : last + 1] == lane)
            ns = float(done - begin) if iv.holds(timing.windows, start[first : first + 1])[0] else 0.0
        around = set(names[rows].unique())
        if ((lanes[maths] == lane) & (start[maths] <= begin) & (end[maths] >= done)).any():
            around.add(_MATH)
        found.append((block, mine, around, ns))
    return found


@per_rank
def attention(
    has_device: bool = needs(has_device),
    kernels: Maybe[Frame] = maybe(kernels),
    spans: Frame = needs(schema.SPANS),
    attention_blocks: list[Found] = needs(attention_blocks),
    timing: Timing = needs(timing),
    shorter_kernels: Maybe[Callable[[NDArray[np.bool_], float], float]] = maybe(shorter_kernels),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return the attention whose scores lie in memory, in a mean steady traced step, by pass and shape, longest first.

    Columns: passes ("forward", "backward"), dtype, shape ("": not known), calls, ns (of all kernels from the first
    product to the last; on a CPU of that time), fused_ns (what a fused kernel takes at most; NaN: the shape or the
    device's peaks are not known), between (the operators from product to product, by name), math (1: SDPA that found no
    fused kernel), most_ns (how much shorter the mean steady step would be with all of them fused; on a CPU a traced
    one), share (`fused_share`; on a CPU 0). Sequences below LEAST_LENGTH are left out. Raises NotMeasured where the
    trace of a job on a GPU holds no work of it.
    """
    counted, counted_dtype, any_counted = _counted(rank)
    name, peaks, bandwidth = device_peaks(rank.facts, rank.trace_facts)
    share = fused_share(name, settings.version_of(rank.facts)) if has_device else 0.0
    found = []
    fusable = np.zeros(len(kernels.get()) if has_device else 0, dtype=bool)
    drops = any(names & _DROPS for _, _, names, _ in attention_blocks)  # whose backward pass is a product like others
    for block, places, names, ns in attention_blocks:
        before, after = _texts(spans["shape"], block.before), _texts(spans["shape"], block.after)
        shape = _shape(before, after) if before or after else counted
        # Products of other shapes are no attention; of short sequences none that a fused kernel makes much faster.
        if not ns or (shape is None and (before or after or any_counted)):
            continue
        if shape and min(shape.s, shape.t) < LEAST_LENGTH:
            continue
        dtype = next(iter(_texts(spans["dtype"], block.before + block.after)), counted_dtype)
        if has_device:
            best = _fused_ns(shape, dtype, block.passes, peaks, bandwidth, share)
            fusable[places] |= best < ns
        else:
            products = float(spans["dur_ns"].to_numpy()[block.before + block.after].sum())
            best = ns if drops else min(products * _OF_PRODUCTS_ON_CPU, ns) if shape else math.nan
        found.append((block.passes, dtype, str(shape or ""), ns, best, " ".join(sorted(names))))
    each = pd.DataFrame(found, columns=["passes", "dtype", "shape", "ns", "fused_ns", "between"])
    faster = each[each["fused_ns"] < each["ns"]]
    frame = each.assign(calls=0.0)
    if found:
        frame = each.groupby(["passes", "dtype", "shape"], sort=False, as_index=False).agg(
            calls=("ns", "size"),
            ns=("ns", "sum"),
            fused_ns=("fused_ns", "mean"),
            between=("between", lambda names: " ".join(sorted(set(" ".join(names).split())))),
        )
    n = len(timing.windows)
    left = float(faster["fused_ns"].sum() / faster["ns"].sum()) if len(faster) else 1.0
    most = float((faster["ns"] - faster["fused_ns"]).sum()) / n
    frame = frame.assign(
        calls=frame["calls"] / n,
        ns=frame["ns"] / n,
        fused_ns=frame["fused_ns"] * frame["calls"] / n,
        math=[int(_MATH in names.split()) for names in frame["between"]],
        most_ns=shorter_kernels.get()(fusable, left) if has_device and len(faster) else most,
        share=share,
    )
    return frame.sort_values("ns", ascending=False, kind="stable", ignore_index=True)


@per_rank
def masked_attention(
    kernels: Frame = needs(kernels),
    spans: Frame = needs(schema.SPANS),
    is_on_device: NDArray[np.bool_] = needs(is_on_device),
    timing: Timing = needs(timing),
    shorter_kernels: Maybe[Callable[[NDArray[np.bool_], float], float]] = maybe(shorter_kernels),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return the fused attention that takes a mask as a tensor, in a mean steady traced step, by shape, longest first.

    Columns: operator, dtype, shape, calls, ns (of all its kernels, those that convert the mask too, and of its backward
    pass), flash_ns (what FlashAttention takes at `share` of the device's peaks, of as many queries as keys for the half
    that a causal mask leaves; NaN: the peaks are not known), causal (1: that half), most_ns (how much shorter the mean
    steady step would be with all of them so), share. Left out are what FlashAttention does not take, and sequences
    below LEAST_LENGTH. The shapes are the counted step's: raises NotMeasured where no such attention was counted.
    """
    columns = ["operator", "dtype", "shape", "calls"]
    start, end = spans["start_ns"].to_numpy(), (spans["start_ns"] + spans["dur_ns"]).to_numpy()
    rows, around, backward = (
        np.flatnonzero(~is_on_device & host.is_one_of(spans["name"], *names))
        for names in (TAKES_MASK, [_SDPA], [f"{name}_backward" for name in TAKES_MASK])
    )
    if not len(rows):
        return pd.DataFrame(columns=[*columns, "ns", "flash_ns", "causal", "most_ns", "share"])
    outer = iv.union(start[around], end[around])
    outer = outer[iv.within(iv.union(start[rows], end[rows]), outer[:, 0], outer[:, 1]) > 0]
    passes = {
        "forward": iv.merge(outer, iv.union(start[rows], end[rows])),
        "backward": iv.union(start[backward], end[backward]),
    }
    counted = [one for one in (rank.facts.get("flops") or {}).get("shapes") or () if one["operator"] in TAKES_MASK]
    if not counted:
        raise NotMeasured("the shapes of attention were not counted (--flops on)")
    name, peaks, bandwidth = device_peaks(rank.facts, rank.trace_facts)
    share, n = fused_share(name, settings.version_of(rank.facts)), len(timing.windows)
    inside = (kernels["owner"] >= 0) & (kernels["step"] >= 0)
    inside &= iv.holds(iv.merge(*passes.values()), start[kernels["owner"]])
    took = float(kernels["dur_ns"][inside].sum())
    found = []
    for one in counted:
        q, k, v, *mask = sizes(str(one["shape"]))
        shape, causal = Shape(math.prod(q[:-2]), q[-2], k[-2], q[-1], v[-1]), q[-2] == k[-2]
        fits = shape.d <= WIDEST and min(shape.s, shape.t) >= LEAST_LENGTH and one["dtype"] in SIXTEEN_BITS
        flash = sum(
            _fused_ns(shape, str(one["dtype"]), each, peaks, bandwidth, share, 0.5 if causal else 1.0)
            for each, times in passes.items()
            if len(times)
        )
        work = one["calls"] * shape.batch * shape.s * shape.t * (shape.d + shape.e)
        found.append([*(one[c] for c in columns), work, one["calls"] * flash, int(causal), bool(mask) and fits])
    frame = pd.DataFrame(found, columns=[*columns, "ns", "flash_ns", "causal", "fits"])
    frame["ns"] *= took / n / frame["ns"].sum()  # by its FLOPs
    frame = frame[frame["fits"]].drop(columns="fits").sort_values("ns", ascending=False, ignore_index=True)
    gone = float((frame["ns"] - frame["flash_ns"]).clip(lower=0.0).sum()) * n
    most = shorter_kernels.get()(inside.to_numpy(), 1 - gone / took) if gone else 0.0
    return frame.assign(most_ns=most, share=share)


def _texts(column: pd.Series[str], rows: list[int]) -> list[str]:
    """Return what some rows of the spans have in a column of texts, where they have any."""
    return [text for text in column.array[rows].tolist() if isinstance(text, str) and text]


def _blocks(spans: pd.DataFrame, is_on_device: NDArray[np.bool_]) -> Iterator[Block]:
    """Find each softmax with batched products as the nearest ones before and after it on its thread.

    In the forward pass one on either side, in the backward pass up to two: the gradients of the probabilities and of
    the values, then those of queries and keys. The softmax of a loss or of a router is between other products.
    """
    names = spans["name"].cat
    letters = np.array(["o" if "convolution" in c else _LETTERS.get(c, "") for c in names.categories], dtype=object)
    letter = letters[names.codes.to_numpy()]
    chosen = np.flatnonzero(host.is_kind(spans, "op") & ~is_on_device & (letter != ""))
    for _, places in pd.Series(chosen).groupby(spans["lane"].cat.codes.to_numpy()[chosen]):
        rows = places.tolist()
        text = "".join(letter[rows])
        for softmax in re.finditer(r"(?<=b)[sg](?=b)", text):
            at, passes = softmax.start(), "backward" if softmax[0] == "g" else "forward"
            before = 2 if passes == "backward" and text.endswith("bb", 0, at) else 1
            after = 2 if passes == "backward" and text.startswith("bb", at + 1) else 1
            yield Block(passes, rows[at - before : at], rows[at + 1 : at + 1 + after])


def _shape(before: list[str], after: list[str]) -> Shape | None:
    """Return an attention's shape by its products': what one of the first makes one of the others takes; None: none."""
    for first in map(sizes, before):
        for second in map(sizes, after):
            if [len(t) for t in (*first[-2:], *second[-2:])] != [3] * 4:
                continue
            (batch, s, d), (_, inner, t) = first[-2:]
            if second[-2] == [batch, s, t] and second[-1][:2] == [batch, t] and inner == d:
                return Shape(batch, s, t, d, second[-1][2])
    return None


def _counted(rank: RankFacts) -> tuple[Shape | None, str, bool]:
    """Return shape and type of the attention in the step that was counted, and whether any batched product was.

    If there are several, the one that computes most counts, so the time of a fused kernel is not underestimated. The
    gradients' products also fit each other, in reverse order. To exclude them, the product that makes the scores must
    be called no more often than the one that takes them. If both are called equally often, the scores must be larger.
    """
    counted = (rank.facts.get("flops") or {}).get("shapes") or []
    batched = [row for row in counted if row.get("operator") in _BATCHED and row.get("shape")]
    found = []
    for first, second in product(batched, batched):
        shape = _shape([str(first["shape"])], [str(second["shape"])])
        if shape:
            makes_scores = int(first.get("calls") or 0) <= int(second.get("calls") or 0)
            scores = shape.batch * shape.s * shape.t
            found.append((makes_scores, scores * (shape.d + shape.e), scores, shape, str(first.get("dtype") or "")))
    if not found:
        return None, "", bool(batched)
    *_, shape, dtype = max(found, key=lambda one: one[:3])
    return shape, dtype, True


def fused_share(device_name: str, torch_version: tuple[int, int] | None) -> float:
    """Return which share of its peaks a device reaches in a fused kernel, with a version of torch (None: not known)."""
    if torch_version is None or torch_version < _SECOND_IN_TORCH:
        return FUSED_SHARE
    return next((share for pattern, share in _SECOND_SHARES if pattern.search(device_name)), FUSED_SHARE)


def _fused_ns(
    shape: Shape | None,
    dtype: str,
    passes: str,
    peaks: Mapping[str, float],
    bandwidth: float,
    share: float,
    scores: float = 1.0,
) -> float:
    """Return what a fused kernel takes of one pass at a share of the peaks, ns; NaN where they are not known.

    Forward two products, backward five (the scores are made anew); queries, keys, values and the result moved once, in
    the backward pass with their gradients. `scores`: the share that is computed; a causal one may skip half.
    """
    # FlashAttention takes 16 bits and devices that have bfloat16; the speed of kernels for others is not known.
    if shape is None or dtype not in SIXTEEN_BITS or "bfloat16" not in peaks or not bandwidth:
        return math.nan
    backward = passes == "backward"
    products = 3 * shape.d + 2 * shape.e if backward else shape.d + shape.e
    flops = 2.0 * scores * shape.batch * shape.s * shape.t * products
    moved = shape.batch * (shape.s + shape.t) * (shape.d + shape.e) * width_of(dtype) * (2 if backward else 1)
    best = max(flops / peaks[dtype], moved / bandwidth) * 1e9
    return max(best / share, SMALL_NS / 2)
