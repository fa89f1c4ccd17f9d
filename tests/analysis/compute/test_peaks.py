"""Peaks of devices by their names, products by their shapes, and the share of the peak that a step computes at."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dlprof.analysis.compute.peaks import (
    PARTS,
    allows_tf32,
    arithmetic,
    device_of,
    device_peaks,
    host_link,
    nvlink,
    part,
)
from dlprof.analysis.compute.products import misaligned, misaligned_sizes, products, saved_in_16_bits
from dlprof.analysis.diagnosis import diagnose
from dlprof.errors import NotMeasured
from dlprof.read.run import open_run
from dlprof.report import formatting
from tests.fixtures import runs
from tests.fixtures.runs import A100, MS


@pytest.mark.parametrize(
    ("name", "units", "clock_ghz", "rate", "gb_s"),
    [
        # FLOP in 16 bits a clock and multiprocessor, adding up in float32: 1,024 of Volta's and Turing's T4, 2,048 of
        # GA100, 1,024 of GA102 and Ada, half of both where NVIDIA halves it, 4,096 of Hopper; 1,024 to 4,096 of CDNA.
        ("Tesla V100-SXM2-32GB", 80, 1.53, 1024, 900),
        ("Tesla V100S-PCIE-32GB", 80, 1.597, 1024, 1134),
        ("Tesla T4", 40, 1.59, 1024, 300),
        ("NVIDIA GeForce RTX 2080 Ti", 68, 1.545, 512, 616),
        ("NVIDIA A100-SXM4-80GB", 108, 1.41, 2048, 2039),
        ("A100-SXM4-40GB", 108, 1.41, 2048, 1555),  # as drivers before 470 call it
        ("NVIDIA A100-PG509-200", 108, 1.41, 2048, 1555),
        ("NVIDIA A100 80GB PCIe", 108, 1.41, 2048, 1935),
        ("NVIDIA A800-SXM4-80GB", 108, 1.41, 2048, 2039),
        ("NVIDIA A30", 56, 1.44, 2048, 933),
        ("NVIDIA A10", 72, 1.695, 1024, 600),
        ("NVIDIA A10G", 80, 1.71, 512, 600),
        ("NVIDIA A40", 84, 1.74, 1024, 696),
        ("NVIDIA RTX A6000", 84, 1.8, 1024, 768),
        ("NVIDIA L4", 58, 2.04, 1024, 300),
        ("NVIDIA L40", 142, 2.49, 512, 864),
        ("NVIDIA L40S", 142, 2.49, 1024, 864),
        ("NVIDIA RTX 6000 Ada Generation", 142, 2.505, 1024, 960),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 188, 2.617, 1024, 1792),
        ("NVIDIA GeForce RTX 3090", 82, 1.695, 512, 936),
        ("NVIDIA GeForce RTX 4090", 128, 2.52, 512, 1008),
        ("NVIDIA GeForce RTX 5090", 170, 2.407, 512, 1792),
        ("NVIDIA H100 80GB HBM3", 132, 1.83, 4096, 3350),
        ("NVIDIA H100 PCIe", 114, 1.62, 4096, 2000),
        ("NVIDIA H200", 132, 1.83, 4096, 4800),
        ("NVIDIA GH200 480GB", 132, 1.83, 4096, 4000),
        ("AMD Instinct MI210", 104, 1.7, 1024, 1638),
        ("AMD Instinct MI250X", 110, 1.7, 1024, 1638),  # one of its two dies, which is what a process sees
        ("AMD Instinct MI300X", 304, 2.1, 2048, 5300),
        ("AMD Instinct MI300X VF", 304, 2.1, 2048, 5300),
        ("AMD Instinct MI300A", 228, 2.1, 2048, 5300),
        ("AMD Instinct MI325X", 304, 2.1, 2048, 6000),
        ("AMD Instinct MI350X", 256, 2.2, 4096, 8000),
        ("AMD Instinct MI355X", 256, 2.4, 4096, 8000),
    ],
)
def test_a_peak_is_what_its_units_and_their_clock_make(
    name: str, units: int, clock_ghz: float, rate: int, gb_s: float
) -> None:
    found = part(name)
    assert found is not None
    assert found.flops["float16"] == pytest.approx(units * clock_ghz * 1e9 * rate, rel=0.01)
    assert found.bandwidth == gb_s * 1e9
    assert found.sms in (0, units)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        # The whitepapers' own tables, "with FP32 Accumulate", dense.
        ("NVIDIA GeForce RTX 3090", {"bfloat16": 71.2, "tf32": 35.6, "float32": 35.6}),
        ("NVIDIA GeForce RTX 4090", {"float8": 330.3, "bfloat16": 165.2, "tf32": 82.6, "float32": 82.6}),
        ("NVIDIA GeForce RTX 5090", {"float8": 419, "bfloat16": 209.5, "tf32": 104.8, "float32": 104.8}),
        ("NVIDIA GeForce RTX 5070", {"bfloat16": 61.7}),
        ("AMD Instinct MI250X", {"bfloat16": 191.5, "float32": 47.9}),
        # 0: no tensor cores for it.
        ("Tesla V100-SXM2-16GB", {"bfloat16": 0}),
        ("NVIDIA A100-SXM4-80GB", {"float8": 0}),
        ("AMD Instinct MI355X", {"tf32": 0}),
    ],
)
def test_each_precision_has_its_own(name: str, tflops: dict[str, float]) -> None:
    found = part(name)
    assert found is not None
    assert {p: found.flops.get(p, 0) / 1e12 for p in tflops} == pytest.approx(tflops, rel=2e-3)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A100-SXM-64GB",
        "GRID A100-40C",
        "NVIDIA H20 NVL16",
        "AMD Radeon Graphics",
        "Some GPU 9",
        "",
    ],
)
def test_another_part_by_a_like_name_is_not_known(name: str) -> None:
    assert device_peaks({"device": {"name": name}}, {}) == (name, {}, 0.0)


@pytest.mark.parametrize(
    ("name", "sms", "share", "memory"),
    [
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 14, 14 / 108, 1 / 8),
        ("NVIDIA A100-SXM4-80GB MIG 1g.20gb", 0, 1 / 7, 2 / 8),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 42, 42 / 108, 4 / 8),
        ("NVIDIA A100-SXM4-80GB MIG 1c.3g.40gb", 0, 1 / 7, 4 / 8),
        ("NVIDIA A100-SXM4-80GB MIG 7g.80gb", 0, 1, 1),
        ("NVIDIA H100 80GB HBM3 MIG 2g.20gb", 32, 32 / 132, 2 / 8),
        ("NVIDIA H200 MIG 1g.18gb", 0, 1 / 7, 1 / 8),
        ("NVIDIA A30 MIG 1g.6gb", 0, 1 / 4, 1 / 4),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb+me", 0, 1 / 7, 1 / 8),
    ],
)
def test_a_slice_has_its_share(name: str, sms: int, share: float, memory: float) -> None:
    whole, cut = part(name.partition(" MIG")[0]), part(name, sms)
    assert whole is not None
    assert cut is not None
    assert cut.flops["bfloat16"] == pytest.approx(whole.flops["bfloat16"] * share)
    assert cut.bandwidth == pytest.approx(whole.bandwidth * memory)
    assert nvlink(name) is None


def test_units_tell_parts_of_one_name_apart() -> None:
    dies = [part("AMD Instinct MI250X/MI250", units) for units in (0, 104, 110)]
    assert [round(p.flops["bfloat16"] / 1e12, 1) for p in dies if p] == [181.0, 181.0, 191.5]
    assert part("AMD Instinct MI300X", 38) is None  # one of eight partitions of it
    names = [p.pattern for p in PARTS if p.pattern.isalnum() or " " in p.pattern]
    assert all(sum(p.pattern == name or part(name) is p for p in PARTS) <= 1 for name in names)


def test_the_device_is_the_recorders_else_the_traces_and_units_are_the_traces() -> None:
    listed = [{"name": "AMD Instinct MI300X", "numSms": 304}] * 8
    assert device_of({}, {"devices": listed}) == ("AMD Instinct MI300X", 304)
    mixed = [*listed, {"name": "AMD Instinct MI300X", "numSms": 38}]
    assert device_of({"device": {"name": "AMD Instinct MI300X"}}, {"devices": mixed}) == ("AMD Instinct MI300X", 0)
    assert device_of({}, {"devices": [7, {"name": "x", "numSms": [1]}]}) == ("x", 0)
    assert device_of({}, {"devices": [{"name": "x", "numSms": -1}]}) == ("x", 0)
    assert device_of({}, {}) == ("", 0)


@pytest.mark.parametrize(
    ("name", "gb_s"),
    [
        ("NVIDIA GeForce RTX 4060", 15.75),  # eight lanes
        ("NVIDIA GH200 480GB", 450.0),
        ("AMD Instinct MI300X", 63.0),
        ("AMD Instinct MI300A", None),  # its memory is the host's
        ("Something else", None),
    ],
)
def test_the_link_to_the_host(name: str, gb_s: float | None) -> None:
    assert host_link(name) == (None if gb_s is None else pytest.approx(gb_s * 1e9, rel=1e-3))


# ---- the share of the peak -----------------------------------------------------------------------------------------


def row(dtype: str, flops: float, operator: str = "aten::mm") -> dict[str, Any]:
    return {"operator": operator, "dtype": dtype, "flops": int(flops), "calls": 1}


def counted(folder: Path, device: dict[str, Any], *operators: dict[str, Any], **more: Any) -> Path:
    """Write 30 steps of 10 ms, of which one was counted."""
    total = sum(r["flops"] for r in operators)
    told = {"state": "counted", "step": 9, "total": total, "backward": total // 3, "operators": list(operators)}
    facts = {"device": device, "flops": told, **more}
    return runs.recorded(folder / "run", (None, [runs.light(n, 10 * MS) for n in range(30)], facts))


# Half of the step at the peak of bfloat16, a quarter at TF32's, an eighth at float32's.
MIXED = [row("bfloat16", 1.56e12), row("float32", 0.39e12, "aten::convolution"), row("float32", 19.5e12 * 0.01 / 8)]
HALVES = [row("bfloat16", 1.56e11)] * 2
CPU, RADEON, T4 = ({"type": kind, "name": name} for kind, name in (("cpu", "EPYC"), ("cuda", "Radeon"), ("cuda", "T4")))


@pytest.mark.parametrize(
    ("device", "operators", "mfu", "peak", "why"),
    [
        (A100, [row("bfloat16", 1.56e12)], 0.5, 312e12, ""),
        (A100, MIXED, 0.875, math.nan, ""),
        # A precision without a peak in less than a hundredth of the FLOPs does no harm.
        (A100, [*HALVES, row("int8", 3e9)], 0.1, 312e12, ""),
        (A100, [*HALVES, row("int8", 2e9), row("int4", 2e9)], math.nan, math.nan, "one of the step's precisions"),
        (T4, [row("bfloat16", 1e12)], math.nan, math.nan, "one of the step's precisions"),
        (CPU, [row("float32", 1e12)], math.nan, math.nan, "peak of a CPU"),
        (RADEON, [row("float16", 1e12)], math.nan, math.nan, "peak of Radeon"),
        # 25 TFLOP/s, of 19.5.
        (A100, [row("float32", 2.5e11)], math.nan, 19.5e12, "not a typical one"),
    ],
    ids=["one", "mixed", "little unknown", "more unknown", "unknown", "CPU", "unknown device", "exceeded"],
)
def test_each_precision_counts_against_its_own_peak(
    tmp_path: Path, device: Any, operators: Any, mfu: float, peak: float, why: str
) -> None:
    path = counted(tmp_path, device, *operators, matmul={"allow_tf32": False, "cudnn_allow_tf32": True})
    (found,) = runs.measured(path, arithmetic).frame(arithmetic).to_dict("records")
    assert (found["mfu"], found["peak"]) == pytest.approx((mfu, peak), rel=1e-4, nan_ok=True)
    total = sum(one["flops"] for one in operators)
    assert (found["flops_per_s"], found["backward"]) == pytest.approx((total * 100, 1 / 3))
    assert why in found["why"]
    result = diagnose(open_run(path), (), jobs=1)
    assert result.window is not None
    assert (result.window.flops, result.window.mfu) == (total, None if why else pytest.approx(mfu, rel=1e-4))
    assert not why or any(f.section == "Arithmetic" and f.name == "MFU" and why in f.value for f in result.facts)
    assert ("% MFU" in formatting.steps(result)) == (not why)


@pytest.mark.parametrize(
    ("flops", "why"),
    [
        ({"state": "off"}, "--flops off"),
        ({"state": "waiting"}, "ended before"),
        ({"state": "abstained", "why": "the script uses torch.compile"}, "torch.compile"),
        ({}, "not counted"),
        ({"state": "counted", "total": 0, "operators": []}, "not counted"),
    ],
)
def test_what_was_not_counted_is_not_measured(tmp_path: Path, flops: dict[str, Any], why: str) -> None:
    steps = [runs.light(n, 10 * MS) for n in range(30)]
    path = runs.recorded(tmp_path / "run", (None, steps, {"device": A100, "flops": flops}))
    with pytest.raises(NotMeasured, match=why):
        runs.measured(path, arithmetic).frame(arithmetic)


@pytest.mark.parametrize(
    ("matmul", "product", "convolution"),
    [
        ({"allow_tf32": True, "cudnn_allow_tf32": False}, True, False),
        ({"allow_tf32": None, "matmul_fp32_precision": "tf32", "conv_fp32_precision": "ieee"}, True, False),
        ({"matmul_fp32_precision": "none", "conv_fp32_precision": "none", "fp32_precision": "tf32"}, True, True),
        ({"matmul_fp32_precision": "none", "conv_fp32_precision": "tf32", "fp32_precision": "none"}, False, True),
        ({}, False, False),
    ],
)
def test_tf32_is_what_the_job_set_by_either_of_torchs_ways(
    matmul: dict[str, Any], product: bool, convolution: bool
) -> None:
    assert (allows_tf32(matmul, False), allows_tf32(matmul, True)) == (product, convolution)


# ---- products by their shapes --------------------------------------------------------------------------------------

PEAKS = {"float8": 400e12, "bfloat16": 200e12, "float32": 20e12}


def frame(*rows: Mapping[str, Any]) -> pd.DataFrame:
    """Return rows of operators of one call, each of 1 ms, whose FLOPs are those of their shapes."""
    made = []
    for row in rows:
        flops, size = products(str(row["operator"]), str(row["shape"]), str(row["dtype"]))
        made.append({"calls": 1.0, "ns": 1e6, "flops": flops, "bytes": size, "shared": False, "float32_ns": 0.0, **row})
    return pd.DataFrame(made)


@pytest.mark.parametrize(
    ("operator", "shape", "dtype", "flops", "size"),
    [
        ("aten::bmm", "4x2x3 4x3x5", "float32", 2 * 4 * 2 * 3 * 5, 4 * 4 * (6 + 15 + 10)),
        ("aten::addmm", "5 2x3 3x5", "bfloat16", 2 * 2 * 3 * 5, 2 * (6 + 15 + 10)),
        # Operands of a byte, their scales, and a product of two.
        ("aten::_scaled_mm", "2x3 3x5 1 1", "float8_e4m3fn", 2 * 2 * 3 * 5, 6 + 15 + 2 * 10),
        # What these shapes do not tell.
        ("aten::convolution", "8x3x9x9 4x3x3x3", "float32", math.nan, math.nan),
        ("aten::mm", "2x3", "float32", math.nan, math.nan),
        ("aten::mm", "2x3 4x5", "float32", math.nan, math.nan),
        ("aten::mm", "3 3", "float32", math.nan, math.nan),
    ],
)
def test_what_a_product_computes_and_moves(operator: str, shape: str, dtype: str, flops: float, size: float) -> None:
    assert products(operator, shape, dtype) == pytest.approx((flops, size), nan_ok=True)


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
        ("aten::mm", "64x64 64x15", "float16", []),
        ("aten::mm", "64x64 64x1036", "float16", [1036]),
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
