"""Matrix products and convolutions run in float32, where the device has tensor cores.

Since Volta, NVIDIA's GPUs multiply 16-bit numbers on tensor cores, 8 to 16 times as fast as float32 without them, with
half of the memory traffic. From Ampere on tensor cores also take float32, with its mantissa cut to 10 bits (TF32).

Needs a trace of a GPU whose peaks are known. Kernels are recognised by their names; what multiplies on a unit that its
name does not show is left out. A CPU is not judged: what units for 16-bit products it has is not recorded.

Saving: each such product as long as its FLOPs take at half of the peak in 16 bits, or its bytes at half their number,
whichever is longer; where the shapes are not known, as if it now ran at the peak of float32. It is bounded by what the
host could launch sooner. What other operators gain by their halved traffic is not in it.

What to change: `torch.autocast("cuda", torch.bfloat16)` around the forward pass (with float16 also a `GradScaler`); or,
from Ampere on, TF32: `torch.backends.cuda.matmul.fp32_precision = "tf32"` for products and
`torch.backends.cudnn.conv.fp32_precision = "tf32"` for convolutions (before torch 2.9
`torch.set_float32_matmul_precision("high")` and `torch.backends.cudnn.allow_tf32 = True`). An AMD MI300 has it as XF32,
which PyTorch uses where `HIPBLASLT_ALLOW_TF32=1` is set as well.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.compute.arithmetic import allows_tf32
from dlprof.analysis.compute.peaks import device_peaks
from dlprof.analysis.compute.products import TENSOR_SHARE
from dlprof.analysis.engine import Job, Maybe, by_rank
from dlprof.analysis.estimate import LEAST_SHARE, Estimate, Explanation, Rule, change, worst
from dlprof.analysis.panel import table
from dlprof.analysis.step.breakdown import part_noise
from dlprof.analysis.step.savings import saving
from dlprof.errors import NotMeasured
from dlprof.result import Change, Scalar
from dlprof.units import digits, duration, percent

# A line of code, but one that changes numbers: worth it from 5 % of the step on.
NOTABLE_SHARE = 0.05

MOST_ROWS = 12


def check(
    tensor_cores: Maybe[pd.DataFrame],
    mean_step_ns: float,
    own_time: pd.DataFrame,
    breakdown: Maybe[pd.DataFrame],
    job: Job,
) -> Estimate:
    """Estimate what the products that use no tensor cores would save there."""
    if settings.on_cpu(job):
        raise NotMeasured("the job trains on the CPU, and whether that has units for 16-bit products is not recorded")
    frame = tensor_cores.get()
    took, saved = by_rank(frame, "float32_ns"), by_rank(frame, "fp32_saved_ns")
    rank, known = worst(took), bool(frame["fp32_saved_ns"].notna().all())
    share = took[rank] / mean_step_ns
    summary = f"products in float32 without tensor cores take {percent(share)} of the step"
    if share < NOTABLE_SHARE:
        unknown = frame["unknown_ns"].sum() / max(frame["kernel_ns"].sum(), 1.0)
        if unknown >= LEAST_SHARE:
            summary += f"; {percent(unknown)} of the kernels' time may be such products too, by their names"
        most = saved if known else took
        return Estimate(saving_ns=saving(own_time, most), by_rank_ns=most, summary=summary, clear=True)
    if not known:
        name = device_peaks(job.facts[rank], job.trace_facts[rank])[0]
        raise NotMeasured(f"the peaks of {name or 'this device'} are not known")
    gain = saving(own_time, saved)
    return Estimate(
        saving_ns=gain,
        by_rank_ns=saved,
        noise_ns=part_noise(breakdown.get(), "computation"),
        loses="would be saved by multiplying in 16 bits",
        summary=f"{summary}, but in 16 bits it would be only {percent(gain / mean_step_ns)} shorter: the host launches"
        " no faster, or memory is the limit",
        seen=rank,
    )


def explain(
    estimate: Estimate, tensor_cores: pd.DataFrame, mean_step_ns: float, operators: pd.DataFrame, job: Job
) -> Explanation:
    """Name the rank with most such products, how much faster its device is in 16 bits, and the settings for it."""
    rank = estimate.seen
    name, peaks, _ = device_peaks(job.facts[rank], job.trace_facts[rank])
    half = "bfloat16" if "bfloat16" in peaks else "float16"
    # AMD's matrix cores take float32 as it is.
    without = "" if "Instinct" in name else " without tensor cores"
    mine = operators[(operators["rank"] == rank) & (operators["float32_ns"] > 0)].replace("", np.nan)
    return Explanation(
        title=f"Matrix products run in float32{without}",
        summary=f"Products and convolutions in float32 take {duration(by_rank(tensor_cores, 'float32_ns')[rank])} of a"
        f" step of {duration(mean_step_ns)} on rank {rank}; {name} multiplies"
        f" {digits(peaks[half] / peaks['float32'])} times as fast in {half}.",
        changes=(_autocast(job, rank, half), *(_tf32(job, rank, name) if "tf32" in peaks else ())),
        evidence=table(
            f"Products in float32 without tensor cores, a step of rank {rank}",
            mine,
            {"operator": "operator", "shape": "shapes", "calls": "times a step", "float32_ns": "in float32_ns"},
            MOST_ROWS,
        ),
        sure=f"Estimated at {percent(TENSOR_SHARE)} of the tensor cores' peak, no sooner than the host launches.",
    )


def _autocast(job: Job, rank: int, half: str) -> Change:
    facts = job.facts[rank].get("autocast") or {}
    enabled = facts.get("enabled")
    now = "" if enabled is None else f" (autocast is {'on' if enabled else 'off'})"
    scaler = ", and a `GradScaler`" if half == "float16" else ""
    return change(
        f'`with torch.autocast("cuda", torch.{half}):` around the forward pass{now}{scaler}',
        numerics=True,
        autocast_enabled=(enabled, True),
        autocast_dtype=(facts.get("dtype"), half),
    )


def _tf32(job: Job, rank: int, name: str) -> tuple[Change, ...]:
    """Name the settings that multiply float32 in TF32, by the names that the job's torch has for them."""
    matmul, environment = (job.facts[rank].get(facts) or {} for facts in ("matmul", "env"))
    version = settings.torch_version(job, rank)
    code, convolutions = (f"torch.backends.{of}.fp32_precision = " + '"tf32"' for of in ("cuda.matmul", "cudnn.conv"))
    now, code = matmul.get("matmul_fp32_precision"), f"`{code}`"
    sets: dict[str, tuple[Scalar, Scalar]] = {"fp32_precision": (now, "tf32")}
    convolve: dict[str, tuple[Scalar, Scalar]] = {"fp32_precision": (matmul.get("conv_fp32_precision"), "tf32")}
    if version is None or version < (2, 9):
        now, later = matmul.get("float32_precision"), f" (from torch 2.9 {code})" if version is None else ""
        code, sets = f'`torch.set_float32_matmul_precision("high")`{later}', {"float32_precision": (now, "high")}
        convolutions = "torch.backends.cudnn.allow_tf32 = True"
        convolve = {"allow_tf32": (matmul.get("cudnn_allow_tf32"), True)}
    text = f"or {code}, which keeps float32 and multiplies in TF32" + (f' (is "{now}")' if now else "")
    if "Instinct" in name:
        text += ", with `HIPBLASLT_ALLOW_TF32=1` in the environment"
        sets["HIPBLASLT_ALLOW_TF32"] = (environment.get("HIPBLASLT_ALLOW_TF32"), "1")
    product = change(text, numerics=True, **sets)
    if allows_tf32(matmul, True) or not (matmul.get("cudnn_allow_tf32") is False or "conv_fp32_precision" in matmul):
        return (product,)
    return product, change(f"`{convolutions}` for convolutions, which are now without", numerics=True, **convolve)


RULE = Rule("fp32_matmul", "Products in float32", check, explain, saves_from=("computation",), notable=NOTABLE_SHARE)
