"""Matrix products by their shapes: what they compute and move, and what sizes or float32 make them take too long."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from dlprof.analysis.host.gaps import SMALL_NS

SIXTEEN_BITS = ("bfloat16", "float16")

# What a matrix product reaches of the tensor cores' peak where nothing is in its way: well tuned trainings of large
# models report 40 to 57 % over all of a step (Chowdhery et al. 2022, PaLM, table 3; Narayanan et al. 2021).
TENSOR_SHARE = 0.5

# Sizes below this are somebody's task and nobody's mistake: 10 classes, 3 channels of a picture.
LEAST_SIZE = 16

_WIDTH = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def width_of(dtype: str) -> float:
    """Return the bytes of an element; NaN where the type is not known."""
    return 1 if dtype.startswith("float8") else _WIDTH.get(dtype, math.nan)


def multiple_of(dtype: str) -> int:
    """Return of what a row's length must be a multiple for tensor cores: 16 bytes' worth; 0: it does not matter.

    NVIDIA, Matrix Multiplication Background User's Guide, "Tensor Core Requirements": 8 numbers of 16 bits, 16 of 8.
    """
    return 16 if dtype.startswith("float8") else 8 if dtype in SIXTEEN_BITS else 0


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a frame's rows as dicts, faster than pandas does."""
    names = [str(c) for c in frame.columns]
    return [dict(zip(names, row, strict=True)) for row in zip(*(frame[c].tolist() for c in frame.columns), strict=True)]


def sizes(shape: str) -> list[list[int]]:
    """Return the dimensions of the tensors that a shape's text tells."""
    return [[int(n) for n in tensor.split("x")] for tensor in shape.split()]


def operands(operator: str, shape: str) -> list[list[int]]:
    """Return the dimensions of the two operands of a product: the last two tensors, but the first of a scaled one."""
    tensors = sizes(shape)
    return tensors[:2] if operator.endswith("_scaled_mm") else tensors[-2:]


def products(operator: str, shape: str, dtype: str) -> tuple[float, float]:
    """Return FLOPs and bytes of one matrix product by the shapes of its operands; NaN for what they do not tell.

    Two operations a multiplication; each operand read once and the product written once, in 16 bits where the operands
    have 8. A convolution's output depends on its stride, which no trace tells.
    """
    name = operator.removeprefix("aten::")
    both = operands(operator, shape)
    if name not in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm") or len(both) < 2:
        return math.nan, math.nan
    a, b = both
    if min(len(a), len(b)) < 2 or a[-1] != b[-2]:
        return math.nan, math.nan
    batch = math.prod(a[:-2])
    m, k, n = a[-2], a[-1], b[-1]
    width = width_of(dtype)
    return 2.0 * batch * m * k * n, float(batch * ((m * k + k * n) * width + m * n * max(width, 2)))


def features(operator: str, shape: str) -> list[int]:
    """Return the sizes of features in the shapes of a product: its columns, or a convolution's channels."""
    if operator.endswith("mm"):
        return operands(operator, shape)[-1][-1:]
    return [c for t in sizes(shape)[-2:] for c in t[1:2]]


def misaligned_sizes(operator: str, shape: str, dtype: str) -> list[int]:
    """Return the sizes of features that tensor cores do not like in this type, small ones left out."""
    multiple = multiple_of(dtype)
    return [s for s in features(operator, shape) if multiple and s % multiple and s >= LEAST_SIZE]


def saved_in_16_bits(frame: pd.DataFrame, half: float, bandwidth: float, single: float) -> float:
    """Return what the products in float32 take more than they would on tensor cores in 16 bits, ns.

    By their FLOPs and bytes where these are known; else as if they ran at the peak of float32 now. `half`: FLOP/s that
    tensor cores reach in 16 bits, `single`: the peak of float32, `bandwidth`: bytes/s of the memory, 0: not known.
    """
    saved = 0.0
    for row in records(frame[frame["float32_ns"] > 0]):
        if math.isnan(row["flops"]):
            saved += row["float32_ns"] * max(0.0, 1 - single / half)
        else:
            bytes_ns = row["bytes"] / 2 / bandwidth * 1e9 if bandwidth and not math.isnan(row["bytes"]) else 0.0
            saved += max(0.0, row["float32_ns"] - max(row["flops"] / half * 1e9, bytes_ns))
    return saved


def misaligned(frame: pd.DataFrame, peaks: Mapping[str, float], bandwidth: float) -> tuple[float, float, bool]:
    """Return the ns of misaligned products, what they take too long (NaN: not known), and whether any was looked at.

    The sizes that count are those of features: what stands last in a product's second operand, and the channels of a
    convolution. The number of rows (batch × length) may be any.
    """
    took = saved = 0.0
    looked = False
    for eight in (False, True):
        rows = [
            r
            for r in records(frame)
            if r["shape"] and multiple_of(r["dtype"]) and r["dtype"].startswith("float8") == eight
        ]
        given = (peaks.get(p, 0.0) for p in (("float8",) if eight else SIXTEEN_BITS))
        mine, more = _too_long(rows, max(given) * TENSOR_SHARE, bandwidth)
        took, saved, looked = took + mine, saved + more, looked or bool(rows)
    return took, saved, looked


def _too_long(rows: list[dict[str, Any]], rate: float, bandwidth: float) -> tuple[float, float]:
    """Return of products of one width the ns of the misaligned ones, and what of it good sizes would save."""
    odd = {size for row in rows for size in misaligned_sizes(row["operator"], row["shape"], row["dtype"])}
    wrong = [r for r in rows if odd & _inner(r)] if odd else []
    right = [r for r in rows if r not in wrong and r["flops"] > 0 and r["ns"] > 0]
    # What well-shaped products of this run reach is the best guess for the others, where each has its own time.
    right = [r for r in right if not r["shared"]]
    if sum(r["ns"] for r in right) > 0.2 * sum(r["ns"] for r in rows):
        rate = max(rate * 0.2, sum(r["flops"] for r in right) / sum(r["ns"] for r in right) * 1e9)
    took = sum(r["ns"] for r in wrong)
    if not rate or any(math.isnan(r["flops"]) for r in wrong):
        return took, math.nan if wrong else 0.0
    saved = 0.0
    for r in wrong:
        bytes_ns = r["bytes"] / bandwidth * 1e9 if bandwidth else 0.0
        saved += max(0.0, r["ns"] - max(r["flops"] / rate * 1e9, bytes_ns, SMALL_NS / 2 * r["calls"]))
    return took, saved


def _inner(row: Mapping[str, Any]) -> set[int]:
    """Return the sizes among which a misaligned one matters: the last two of each operand, a convolution's channels."""
    if not row["operator"].endswith("mm"):
        return set(features(row["operator"], row["shape"]))
    return {d for tensor in operands(row["operator"], row["shape"]) for d in tensor[-2:]}
