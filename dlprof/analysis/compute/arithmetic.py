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
from dlprof.analysis.engine import RANK, RankFacts, needs, per_rank
from dlprof.analysis.timeline.steps import NOT_MARKED, Timing, timing
from dlprof.errors import NotMeasured

# FLOPs in precisions whose peak is not known may be this share of all; with more of them the MFU is not known.
_UNKNOWN_SHARE = 0.01


@per_rank
def arithmetic(timing: Timing = needs(timing), rank: RankFacts = needs(RANK)) -> pd.DataFrame:
    """Return one row: flops (of a step), step_ns, flops_per_s, mfu (NaN: see why), backward (share of flops), peak (of
    the one precision that the step computes in, FLOP/s; NaN: of several, or not known) and why.

    Raises NotMeasured, with the reason, where no step was counted.
    """
    flops = _counted(rank)
    if timing.unit != "step":
        raise NotMeasured(NOT_MARKED)
    total, step_s = float(flops["total"]), timing.step_ns / 1e9
    busy_s, peak, why = _at_peak(rank, flops["operators"])
    mfu = busy_s / step_s
    if mfu > 1:
        mfu, why = (
            np.nan,
            "the steps are shorter than the device's known peak allows: the counted step is not a typical one",
        )
    backward = float(flops.get("backward") or 0) / total
    row = {"flops": total, "step_ns": timing.step_ns, "flops_per_s": total / step_s, "mfu": mfu, "backward": backward}
    return pd.DataFrame([row | {"peak": peak, "why": why}])


def _counted(rank: RankFacts) -> dict[str, Any]:
    flops: dict[str, Any] = rank.facts.get("flops") or {}
    state = flops.get("state")
    if state == "counted" and flops.get("total") and flops.get("operators"):
        return flops
    known = {"off": "recorded with --flops off", "waiting": "the job ended before its step was counted"}
    why = known.get(str(state)) or flops.get("why")
    raise NotMeasured(why or "the floating-point operations of a step were not counted")


def _at_peak(rank: RankFacts, operators: list[dict[str, Any]]) -> tuple[float, float, str]:
    """Return how many seconds a step's arithmetic takes at the device's peak, and the peak where one precision has all
    but a little of it; NaN and why where it is not known.
    """
    if (rank.facts.get("device") or {}).get("type") == "cpu":
        return np.nan, np.nan, "the peak of a CPU is not known"
    name, peaks, _ = device_peaks(rank.facts, rank.trace_facts)
    if not peaks:
        return np.nan, np.nan, f"the peak of {name or 'this device'} is not known"
    flops = np.array([float(row["flops"]) for row in operators])
    matmul = rank.facts.get("matmul") or {}
    of_each = np.array([peak_of(str(row["operator"]), str(row["dtype"]), matmul, peaks) for row in operators])
    most = of_each[int(flops.argmax())]
    peak = float(most) if flops[of_each == most].sum() >= (1 - _UNKNOWN_SHARE) * flops.sum() else np.nan
    seconds = flops / of_each
    if flops[np.isnan(seconds)].sum() > _UNKNOWN_SHARE * flops.sum():
        return np.nan, np.nan, f"the peak of {name} in one of the step's precisions is not known"
    return float(np.nansum(seconds)), peak, ""


def peak_of(operator: str, dtype: str, matmul: Mapping[str, Any], peaks: Mapping[str, float]) -> float:
    """Return the peak of the precision in which an operator multiplies, FLOP/s; NaN where it is not known."""
    precision = precision_of(operator, dtype, matmul)
    return peaks.get(precision, peaks.get("float32", np.nan) if precision == "tf32" else np.nan)


def precision_of(operator: str, dtype: str, matmul: Mapping[str, Any]) -> str:
    """Name the precision in which an operator multiplies."""
    if dtype.startswith("float8"):
        return "float8"
    if dtype == "float32" and allows_tf32(matmul, "conv" in operator):
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
