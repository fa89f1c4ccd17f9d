"""How much a rank computes: floating-point operations a second of the mean steady step, and their share of the peak.

MFU (model FLOPs utilization, Chowdhery et al. 2022, PaLM, appendix B) = FLOPs of a step ÷ its time ÷ peak. Where a step
computes in several precisions, each counts against its own peak: MFU = Σ (FLOPs ÷ peak of their precision) ÷ time.
What runs is counted: the masked half of causal attention and what activation checkpointing computes again, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from dlprof.engine import RankData, per_rank
from dlprof.errors import NotMeasured
from dlprof.measures.steps import timing

# Peaks in FLOP/s as the vendors' data sheets give them (NVIDIA's of V100, T4, A10, A100, L4, H100, H200 and HGX B200,
# AMD's of the MI300X), dense: NVIDIA's say "with sparsity" where they are twice these. What a sheet does not give for
# the very part, as float32 of a single B200, is left out. GeForce cards add up in float32 at half the rate, which is
# what PyTorch asks for (Turing whitepaper, appendix A).
_V100 = {"float16": 125e12, "float32": 15.7e12}
_V100_PCIE = {"float16": 112e12, "float32": 14e12}
_T4 = {"float16": 65e12, "float32": 8.1e12}
_RTX_2080_TI = {"float16": 53.8e12, "float32": 13.4e12}
_A10 = {"bfloat16": 125e12, "float16": 125e12, "tf32": 62.5e12, "float32": 31.2e12}
_A100 = {"bfloat16": 312e12, "float16": 312e12, "tf32": 156e12, "float32": 19.5e12}
_H100_PCIE = {"float8": 1513e12, "bfloat16": 756e12, "float16": 756e12, "tf32": 378e12, "float32": 51e12}
_H100_SXM = {"float8": 1979e12, "bfloat16": 989e12, "float16": 989e12, "tf32": 494e12, "float32": 67e12}
_L4 = {"float8": 242e12, "bfloat16": 121e12, "float16": 121e12, "tf32": 60e12, "float32": 30.3e12}
_MI300X = {"float8": 2615e12, "bfloat16": 1307e12, "float16": 1307e12, "float32": 163.4e12}
_B200 = {"float8": 4.5e15, "bfloat16": 2.25e15, "float16": 2.25e15, "tf32": 1.1e15}

# The first pattern that a device's name matches, with its memory's bytes a second by the same data sheets; whole words,
# so that an H20 is no H200. An A100 comes with 40 or 80 GB, a GH200 with HBM3 or HBM3e, and the name does not always
# tell: the slower counts. A slice of a GPU (MIG) has some of its units and bears its name.
_PEAKS: tuple[tuple[str, Mapping[str, float], float], ...] = (
    (r"\bMIG\b", {}, 0.0),
    (r"V100-(?:SXM|DGXS)", _V100, 900e9),
    (r"V100-PCIE", _V100_PCIE, 900e9),
    (r"\bA100-SXM4-80GB\b", _A100, 2039e9),
    (r"\bA100\b.*80GB", _A100, 1935e9),
    (r"\bA100\b", _A100, 1555e9),
    (r"\bH100 PCIe\b", _H100_PCIE, 2000e9),
    (r"\bH[12]00 NVL\b", {}, 0.0),  # parts of their own, of another clock
    (r"\bGH200\b", _H100_SXM, 4000e9),
    (r"\bH200\b", _H100_SXM, 4800e9),
    (r"\bH100\b", _H100_SXM, 3350e9),
    (r"\bB200\b", _B200, 7700e9),
    (r"\bL4\b", _L4, 300e9),
    (r"\bA10\b", _A10, 600e9),
    (r"\bT4\b", _T4, 300e9),
    (r"\bRTX 2080 Ti\b", _RTX_2080_TI, 616e9),
    (r"\bMI300X\b", _MI300X, 5300e9),
)

# FLOPs in precisions whose peak is not known may be this share of all before no MFU is told.
_UNKNOWN_SHARE = 0.01


@per_rank
def arithmetic(rank: RankData) -> pd.DataFrame:
    """Give one row: flops (of a step), step_ns, flops_per_s, mfu (NaN: see why), backward (share of flops) and why.

    Raises NotMeasured, with the reason, where no step was counted.
    """
    flops = _counted(rank)
    t = timing(rank)
    if t.unit != "step":
        raise NotMeasured("nothing marks the steps")
    total = float(flops["total"])
    busy_s, why = _at_peak(rank, flops["operators"])
    mfu = busy_s / (t.step_ns / 1e9)
    if mfu > 1:
        mfu, why = np.nan, "the steps are shorter than the device's known peak allows: the counted step is no usual one"
    return pd.DataFrame(
        {
            "flops": [total],
            "step_ns": [t.step_ns],
            "flops_per_s": [total / (t.step_ns / 1e9)],
            "mfu": [mfu],
            "backward": [float(flops.get("backward") or 0) / total],
            "why": [why],
        }
    )


@per_rank
def operator_flops(rank: RankData) -> pd.DataFrame:
    """Give the FLOPs of one step by operator, the largest first: operator, dtype, flops, calls (-1: not told)."""
    rows = _counted(rank)["operators"]
    return pd.DataFrame(
        {
            "operator": [str(row["operator"]) for row in rows],
            "dtype": [str(row["dtype"]) for row in rows],
            "flops": [float(row["flops"]) for row in rows],
            "calls": [row.get("calls") if row.get("calls") is not None else -1 for row in rows],
        }
    )


def device_peaks(facts: Mapping[str, Any], trace_facts: Mapping[str, Any]) -> tuple[str, Mapping[str, float], float]:
    """Give a rank's device: name, peaks in FLOP/s by precision, bytes a second of its memory; {} and 0: unknown."""
    listed = trace_facts.get("devices") or []
    name = str((facts.get("device") or {}).get("name") or (listed[0].get("name") if listed else "") or "")
    for pattern, peaks, bandwidth in _PEAKS:
        if re.search(pattern, name):
            return name, peaks, bandwidth
    return name, {}, 0.0


def _counted(rank: RankData) -> Mapping[str, Any]:
    flops = rank.facts.get("flops") or {}
    state = flops.get("state")
    if state == "counted" and flops.get("total") and flops.get("operators"):
        counted: Mapping[str, Any] = flops
        return counted
    if state == "off":
        raise NotMeasured("recorded with --flops off")
    if state == "waiting":
        raise NotMeasured("the job ended before its step was counted")
    raise NotMeasured(flops.get("why") or "the floating-point operations of a step were not counted")


def _at_peak(rank: RankData, operators: Any) -> tuple[float, str]:
    """Give how many seconds the step's arithmetic takes at the device's peak, NaN where none is known, and why not."""
    if (rank.facts.get("device") or {}).get("type") == "cpu":
        return np.nan, "the peak of a CPU is not known"
    name, peaks, _ = device_peaks(rank.facts, rank.trace_facts)
    if not peaks:
        return np.nan, f"the peak of {name or 'this device'} is not known"
    matmul = rank.facts.get("matmul") or {}
    total = sum(float(row["flops"]) for row in operators)
    seconds = unknown = 0.0
    for row in operators:
        precision = precision_of(row, matmul)
        peak = peaks.get(precision) or peaks.get("float32" if precision == "tf32" else "")
        if peak is None:
            unknown += float(row["flops"])
        else:
            seconds += float(row["flops"]) / peak
    if unknown > _UNKNOWN_SHARE * total:
        return np.nan, f"the peak of {name} in one of the step's precisions is not known"
    return seconds, ""


def precision_of(row: Mapping[str, Any], matmul: Mapping[str, Any]) -> str:
    """Name the precision in which an operator multiplies."""
    dtype = str(row["dtype"])
    if dtype.startswith("float8"):
        return "float8"
    convolves = "conv" in str(row["operator"])
    if dtype == "float32" and matmul.get("cudnn_allow_tf32" if convolves else "allow_tf32"):
        return "tf32"
    return dtype
