"""Products by their shapes: FLOPs, bytes, and which sizes tensor cores do not like."""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd
import pytest

from dlprof.analysis.compute.products import misaligned, misaligned_sizes, products, saved_in_16_bits

PEAKS = {"float8": 400e12, "bfloat16": 200e12, "float32": 20e12}


def frame(*rows: Mapping[str, Any]) -> pd.DataFrame:
    """Return rows of operators of one call, each of 1 ms, whose FLOPs are those of their shapes."""
    made = []
    for row in rows:
        flops, size = products(str(row["operator"]), str(row["shape"]), str(row["dtype"]))
        made.append({"calls": 1.0, "ns": 1e6, "flops": flops, "bytes": size, "shared": False, "float32_ns": 0.0, **row})
    return pd.DataFrame(made)


def test_what_a_product_computes_and_moves() -> None:
    assert products("aten::bmm", "4x2x3 4x3x5", "float32") == (2 * 4 * 2 * 3 * 5, 4 * 4 * (6 + 15 + 10))
    assert products("aten::addmm", "5 2x3 3x5", "bfloat16") == (2 * 2 * 3 * 5, 2 * (6 + 15 + 10))
    # Operands of a byte, their scales, and a product of two.
    assert products("aten::_scaled_mm", "2x3 3x5 1 1", "float8_e4m3fn") == (2 * 2 * 3 * 5, 6 + 15 + 2 * 10)


def test_products_whose_shapes_do_not_tell_have_no_flops() -> None:
    for operator, shape in (
        ("aten::convolution", "8x3x9x9 4x3x3x3"),
        ("aten::mm", "2x3"),
        ("aten::mm", "2x3 4x5"),
        ("aten::mm", "3 3"),
    ):
        assert all(math.isnan(x) for x in products(operator, shape, "float32"))


@pytest.mark.parametrize(
    ("operator", "shape", "dtype", "found"),
    [
        ("aten::addmm", "50257 8192x768 768x50257", "bfloat16", [50257]),
        ("aten::mm", "8191x768 768x3072", "bfloat16", []),  # any batch will do
        ("aten::mm", "8192x768 768x10", "float16", []),  # ten classes
        ("aten::mm", "8192x768 768x17", "float16", [17]),
        ("aten::mm", "8192x768 768x50257", "float32", []),
        ("aten::_scaled_mm", "64x64 64x1032 1 1", "float8_e4m3fn", [1032]),
        ("aten::mm", "64x64 64x1032", "bfloat16", []),
        ("aten::convolution", "8x3x224x224 64x3x7x7", "bfloat16", []),
        ("aten::convolution", "8x30x9x9 66x30x3x3", "bfloat16", [30, 30]),
    ],
)
def test_sizes_that_tensor_cores_do_not_like(operator: str, shape: str, dtype: str, found: list[int]) -> None:
    assert misaligned_sizes(operator, shape, dtype) == found


def test_each_width_is_held_against_its_own_products() -> None:
    bad = {"operator": "aten::mm", "shape": "1024x1024 1024x1023", "dtype": "bfloat16"}
    good = {"operator": "aten::_scaled_mm", "shape": "1024x1024 1024x1024", "dtype": "float8_e4m3fn", "ns": 2e4}
    took, saved, looked = misaligned(frame(bad, good), PEAKS, 1e12)
    assert (took, looked) == (1e6, True)
    # No good product of 16 bits is here, so half of the peak counts, and not what FP8 reaches.
    assert saved == pytest.approx(1e6 - 2 * 1024 * 1024 * 1023 / 100e12 * 1e9)


def test_without_a_peak_nothing_is_saved_but_the_time_is_told() -> None:
    bad = {"operator": "aten::mm", "shape": "1024x1024 1024x1023", "dtype": "bfloat16"}
    took, saved, looked = misaligned(frame(bad), {}, 0.0)
    assert (took, math.isnan(saved), looked) == (1e6, True, True)
    assert misaligned(frame(bad | {"dtype": "float32"}), PEAKS, 1e12) == (0.0, 0.0, False)


def test_float32_in_16_bits_is_bound_by_arithmetic_or_memory() -> None:
    flat = {"operator": "aten::mm", "shape": "4096x4096 4096x4096", "dtype": "float32", "float32_ns": 7e6, "ns": 7e6}
    thin = {"operator": "aten::mm", "shape": "8192x8 8x8192", "dtype": "float32", "float32_ns": 1e6}
    untold = {"operator": "own", "shape": "", "dtype": "", "float32_ns": 1e6}
    # A forward product's operands and result are cast: half of the bytes of all products once more, in 1.5 × a third.
    casts = 4 * 3 * 4096**2 / 2 / 1e12 * 1e9
    assert saved_in_16_bits(frame(flat), 100e12, 1e12, 20e12) == pytest.approx(7e6 - 2 * 4096**3 / 100e12 * 1e9 - casts)
    size = 4 * (2 * 8192 * 8 + 8192 * 8192)
    assert saved_in_16_bits(frame(thin), 100e12, 1e12, 20e12) == pytest.approx(1e6 - 2 * size / 2 / 1e12 * 1e9)
    assert saved_in_16_bits(frame(untold), 100e12, 1e12, 20e12) == pytest.approx(0.8e6)
