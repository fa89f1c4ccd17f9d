"""How much a rank computes: floating-point operations a second of the mean steady step, and their share of the peak.

MFU (model FLOPs utilization, Chowdhery et al. 2022, PaLM, appendix B) = FLOPs of a step ÷ its time ÷ peak. Where a step
computes in several precisions, each counts against its own peak: MFU = Σ (FLOPs ÷ peak of their precision) ÷ time.
What runs is counted: the masked half of causal attention and what activation checkpointing computes again, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from dlprof.analysis.compute.peaks import device_peaks
from dlprof.analysis.engine import RankFacts, per_rank
from dlprof.analysis.timeline.steps import Timing
from dlprof.errors import NotMeasured

# FLOPs in precisions whose peak is not known may be this share of all before no MFU is told.
_UNKNOWN_SHARE = 0.01


@per_rank
def arithmetic(timing: Timing, rank: RankFacts) -> pd.DataFrame:
    """Return one row: flops (of a step), step_ns, flops_per_s, mfu (NaN: see why), backward (share of flops) and why.

    Raises NotMeasured, with the reason, where no step was counted.
    """
    flops = _counted(rank)
    if timing.unit != "step":
        raise NotMeasured("nothing marks the steps")
    total = float(flops["total"])
    busy_s, why = _at_peak(rank, flops["operators"])
    mfu = busy_s / (timing.step_ns / 1e9)
    if mfu > 1:
        mfu, why = np.nan, "the steps are shorter than the device's known peak allows: the counted step is no usual one"
    return pd.DataFrame(
        {
            "flops": [total],
            "step_ns": [timing.step_ns],
            "flops_per_s": [total / (timing.step_ns / 1e9)],
            "mfu": [mfu],
            "backward": [float(flops.get("backward") or 0) / total],
            "why": [why],
        }
    )


@per_rank
def operator_flops(rank: RankFacts) -> pd.DataFrame:
    """Return the FLOPs of one step by operator, the largest first: operator, dtype, flops, calls (-1: not told)."""
    rows = _counted(rank)["operators"]
    return pd.DataFrame(
        {
            "operator": [str(row["operator"]) for row in rows],
            "dtype": [str(row["dtype"]) for row in rows],
            "flops": [float(row["flops"]) for row in rows],
            "calls": [row.get("calls") if row.get("calls") is not None else -1 for row in rows],
        }
    )


def _counted(rank: RankFacts) -> Mapping[str, Any]:
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


def _at_peak(rank: RankFacts, operators: Any) -> tuple[float, str]:
    """Return how many seconds step's arithmetic takes at the device's peak, NaN where none is known, and why not."""
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
    if dtype == "float32" and allows_tf32(matmul, "conv" in str(row["operator"])):
        return "tf32"
    return dtype


def allows_tf32(matmul: Mapping[str, Any], convolves: bool) -> bool:
    """Return whether the job let products, or convolutions, of float32 run in TF32, by its recorded settings.

    From torch 2.9 each has a setting of its own, and "none" there means the general one
    (torch.backends.fp32_precision). Once they were set, the older getters raise and nothing is recorded of them.
    """
    own = matmul.get("conv_fp32_precision" if convolves else "matmul_fp32_precision")
    said = next((s for s in (own, matmul.get("fp32_precision")) if s and s != "none"), None)
    if said is not None:
        return bool(said == "tf32")
    return bool(matmul.get("cudnn_allow_tf32" if convolves else "allow_tf32"))
