"""Attention that keeps its scores in memory: a softmax between two batched products, and what a fused kernel takes.

Scores of s queries and t keys are s × t numbers a head; written, read and written again by the first product, scaling,
a mask, the softmax, dropout and the second product, they cost more time than the arithmetic. A fused kernel
(FlashAttention, Dao et al. 2022) keeps them on the chip: it moves the queries, keys, values and the result.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import settings
from dlprof.analysis.compute.kernels import shorter_kernels
from dlprof.analysis.compute.operators import nested
from dlprof.analysis.compute.peaks import device_peaks
from dlprof.analysis.compute.products import SIXTEEN_BITS, sizes, width_of
from dlprof.analysis.engine import Maybe, RankFacts, per_rank
from dlprof.analysis.host.gaps import SMALL_NS
from dlprof.analysis.timeline.device import DeviceSets
from dlprof.analysis.timeline.steps import Timing
from dlprof.analysis.timeline.what_if import WhatIf

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

_BATCHED = ("aten::bmm", "aten::baddbmm")
_OTHER = ("aten::mm", "aten::addmm", "aten::_scaled_mm", "aten::_grouped_mm", "aten::addmv", "aten::mv")
_KINDS = {"aten::_softmax": "softmax", "aten::_softmax_backward_data": "backward"}

# What scaled_dot_product_attention does where none of its fused kernels fits.
_MATH = "aten::_scaled_dot_product_attention_math"

COLUMNS = ("passes", "dtype", "shape", "calls", "ns", "fused_ns", "between", "math", "most_ns", "share")


@dataclass(frozen=True)
class Shape:
    """A batch (with heads) of s queries and t keys of d numbers, and values of e."""

    batch: int
    s: int
    t: int
    d: int
    e: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.s}x{self.d} {self.batch}x{self.t}x{self.e}"


@dataclass(frozen=True)
class _Block:
    """One pass of one attention on one thread: its products before and after the softmax, as rows of the spans."""

    backward: bool
    before: tuple[int, ...]
    softmax: int
    after: tuple[int, ...]


@per_rank
def attention(
    device_sets: DeviceSets,  # noqa: ARG001 - required: of a trace without a device nothing is known
    timing: Maybe[Timing],
    spans: pd.DataFrame,
    is_on_device: NDArray[np.bool_],
    kernels: Maybe[pd.DataFrame],
    owners: Maybe[NDArray[np.int64]],
    kernels_within: Maybe[NDArray[np.int64]],
    what_if: Maybe[WhatIf],
    device_work: pd.DataFrame,
    rank: RankFacts,
) -> pd.DataFrame:
    """Return the attention whose scores lie in memory, in a mean steady traced step, by pass and shape, longest first.

    Columns: passes ("forward", "backward"), dtype, shape ("": nobody told it), calls, ns (of all kernels from the first
    product to the last), fused_ns (what a fused kernel takes at most; NaN: the shape or the device's peaks are not
    known), between (the operators from product to product, by name), math (1: SDPA that found no fused kernel), most_ns
    (how much shorter the mean steady step would be with all of them fused), share (`fused_share`). Sequences below
    LEAST_LENGTH are left out. Raises NotMeasured where the trace holds no work of a device.
    """
    n = max(len(timing.get().windows), 1)
    blocks = list(_blocks(spans, is_on_device))
    if not blocks:
        return pd.DataFrame(columns=list(COLUMNS))
    columns = {c: spans[c].cat.categories.astype("str").tolist() for c in ("shape", "dtype")}
    codes = {c: spans[c].cat.codes.to_numpy() for c in columns}

    def told(column: str, rows: tuple[int, ...]) -> list[str]:
        return [columns[column][code] for code in codes[column][list(rows)].tolist() if code >= 0]

    counted, counted_dtype, any_counted = _counted(rank)
    name, peaks, bandwidth = device_peaks(rank.facts, rank.trace_facts)
    share = fused_share(name, settings.version_of(rank.facts))
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    fusable = np.zeros(len(kernels.get()), dtype=bool)
    took = fused = 0.0
    for block, (ns, names, places) in zip(
        blocks, _kernels(spans, kernels.get(), owners.get(), kernels_within.get(), blocks), strict=True
    ):
        before, after = (list(filter(None, told("shape", side))) for side in (block.before, block.after))
        shape = _shape(before, after) if before or after else counted
        # Products of other shapes are no attention; of short sequences none that a fused kernel makes much faster.
        if not ns or (shape is None and (before or after or any_counted)):
            continue
        if shape and min(shape.s, shape.t) < LEAST_LENGTH:
            continue
        dtype = next(filter(None, told("dtype", (*block.before, *block.after))), counted_dtype)
        key = ("backward" if block.backward else "forward", dtype, str(shape) if shape else "")
        row = rows.setdefault(key, {"calls": 0.0, "ns": 0.0, "fused_ns": 0.0, "between": set()})
        row["calls"] += 1 / n
        row["ns"] += ns / n
        best = _fused_ns(shape, dtype, block.backward, peaks, bandwidth, share)
        row["fused_ns"] += best / n
        if best < ns:
            fusable[places] = True
            took, fused = took + ns, fused + best
        row["between"] |= names
    most = (
        shorter_kernels(kernels.get(), what_if, kernels_within, timing, device_work, fusable, fused / took)
        if took
        else 0.0
    )
    made = [
        (*key, row["calls"], row["ns"], row["fused_ns"], " ".join(sorted(row["between"])), int(_MATH in row["between"]))
        for key, row in sorted(rows.items(), key=lambda item: -item[1]["ns"])
    ]
    return pd.DataFrame([(*row, most, share) for row in made], columns=list(COLUMNS))


def _blocks(spans: pd.DataFrame, is_on_device: NDArray[np.bool_]) -> Iterator[_Block]:
    """Find each softmax whose nearest products on its thread are batched ones, before it and after.

    In the forward pass one on either side, in the backward pass up to two: the gradients of the probabilities and of
    the values, then those of queries and keys. The softmax of a loss or of a router stands between other products.
    """
    names = spans["name"].cat
    wanted = [
        "batched" if c in _BATCHED else "other" if c in _OTHER or "convolution" in c else _KINDS.get(c, "")
        for c in names.categories
    ]
    if "batched" not in wanted or not {"softmax", "backward"}.intersection(wanted):
        return
    kind_of = np.array([*wanted, ""], dtype=object)
    for rows, _ in nested(spans, is_on_device, "op"):
        kinds = kind_of[names.codes.to_numpy()[rows]]
        chosen = np.flatnonzero(kinds != "")
        for at, place in enumerate(chosen):
            if kinds[place] not in ("softmax", "backward"):
                continue
            most = 2 if kinds[place] == "backward" else 1
            before = _batched(kinds, chosen[:at][::-1][:most])
            after = _batched(kinds, chosen[at + 1 :][:most])
            if before and after:
                yield _Block(
                    kinds[place] == "backward",
                    tuple(int(rows[i]) for i in reversed(before)),
                    int(rows[place]),
                    tuple(int(rows[i]) for i in after),
                )


def _batched(kinds: NDArray[Any], places: NDArray[np.int64]) -> list[int]:
    """Return the places up to the first that is no batched product."""
    found: list[int] = []
    for place in places.tolist():
        if kinds[place] != "batched":
            break
        found.append(place)
    return found


def _kernels(
    spans: pd.DataFrame,
    kernels: pd.DataFrame,
    owners: NDArray[np.int64],
    kernels_within: NDArray[np.int64],
    blocks: list[_Block],
) -> Iterator[tuple[float, set[str], NDArray[np.int64]]]:
    """Return for each block the ns of its kernels in the steady steps, the operators that launched them, by name, and
    the kernels' places among all.

    A kernel is a block's where its operator begins between the block's first product and its last, on their thread.
    """
    lanes = spans["lane"].cat.codes.to_numpy()
    start = spans["start_ns"].to_numpy()
    end = start + spans["dur_ns"].to_numpy()
    texts = spans["name"].cat.categories.astype("str").tolist()
    codes = spans["name"].cat.codes.to_numpy()
    owner = owners[kernels.index.to_numpy()]
    chosen = np.flatnonzero((kernels_within >= 0) & (owner >= 0))
    owner, dur = owner[chosen], kernels["dur_ns"].to_numpy(dtype=float)[chosen]
    order = np.lexsort((start[owner], lanes[owner]))
    owner, dur, chosen = owner[order], dur[order], chosen[order]
    of_lane, at = lanes[owner], start[owner]
    maths = np.flatnonzero(codes == texts.index(_MATH)) if _MATH in texts else np.empty(0, dtype=np.int64)
    for block in blocks:
        lane, begin, done = lanes[block.softmax], start[block.before[0]], end[block.after[-1]]
        first, last = np.searchsorted(of_lane, lane), np.searchsorted(of_lane, lane, side="right")
        first, last = first + np.searchsorted(at[first:last], (begin, done))
        names = {texts[code] for code in np.unique(codes[owner[first:last]])}
        if ((lanes[maths] == lane) & (start[maths] <= begin) & (end[maths] >= done)).any():
            names.add(_MATH)
        yield float(dur[first:last].sum()), names, chosen[first:last]


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

    Of several the one that computes most: what a fused kernel takes is then no less.
    """
    told: list[Mapping[str, Any]] = (rank.facts.get("flops") or {}).get("shapes") or []
    batched = [row for row in told if row.get("operator") in _BATCHED and row.get("shape")]
    shapes = [str(row["shape"]) for row in batched]
    found = [(shape, str(r.get("dtype") or "")) for r in batched if (shape := _shape([str(r["shape"])], shapes))]
    shape, dtype = max(found, key=lambda f: f[0].batch * f[0].s * f[0].t * (f[0].d + f[0].e), default=(None, ""))
    return shape, dtype, bool(batched)


def fused_share(device_name: str, torch_version: tuple[int, int] | None) -> float:
    """Return which share of its peaks a device reaches in a fused kernel, with a version of torch (None: not known)."""
    if torch_version is None or torch_version < _SECOND_IN_TORCH:
        return FUSED_SHARE
    return next((share for pattern, share in _SECOND_SHARES if pattern.search(device_name)), FUSED_SHARE)


def _fused_ns(
    shape: Shape | None, dtype: str, backward: bool, peaks: Mapping[str, float], bandwidth: float, share: float
) -> float:
    """Return what a fused kernel takes of one pass at a share of the peaks, ns; NaN where they are not known.

    Forward two products, backward five (the scores are made anew); queries, keys, values and the result moved once, in
    the backward pass with their gradients. The masked half of a causal one is counted.
    """
    # FlashAttention takes 16 bits and devices that have bfloat16; of the kernels for others nobody gives the speed.
    if shape is None or dtype not in SIXTEEN_BITS or "bfloat16" not in peaks or not bandwidth:
        return math.nan
    products = 3 * shape.d + 2 * shape.e if backward else shape.d + shape.e
    flops = 2.0 * shape.batch * shape.s * shape.t * products
    moved = shape.batch * (shape.s + shape.t) * (shape.d + shape.e) * width_of(dtype) * (2 if backward else 1)
    best = max(flops / peaks[dtype], moved / bandwidth) * 1e9
    return max(best / share, SMALL_NS / 2)
