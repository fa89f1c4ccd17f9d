"""Matrix products and convolutions run in float32, beside the device's tensor cores.

Since Volta, NVIDIA's GPUs multiply 16-bit numbers on tensor cores, 8 to 16 times as fast as float32 without them, and
they take half of the memory traffic. From Ampere on tensor cores also take float32, with its mantissa cut to 10 bits
(TF32).

Needs a trace of a GPU, and a GPU whose peaks are known. Kernels are told by their names; what multiplies on a unit that
its name does not tell is left out. On a CPU nothing is said: what units for 16-bit products it has is not recorded.

Saving: each such product as long as its FLOPs take at half of the peak in 16 bits, or its bytes at half their number,
whichever is longer; where the shapes are not known, as if it now ran at the peak of float32. It is bounded by what the
host could launch sooner. What other operators gain by their halved traffic is not in it.

What to change: `torch.autocast("cuda", torch.bfloat16)` around the forward pass (with float16 also a `GradScaler`); or,
from Ampere on, TF32: `torch.backends.cuda.matmul.fp32_precision = "tf32"` for products and
`torch.backends.cudnn.conv.fp32_precision = "tf32"` for convolutions (before torch 2.9
`torch.set_float32_matmul_precision("high")` and `torch.backends.cudnn.allow_tf32 = True`). An AMD MI300 has it as XF32,
which PyTorch uses where `HIPBLASLT_ALLOW_TF32=1` is set besides.
"""

from __future__ import annotations

from dlprof.diagnosis import Clear, Rule
from dlprof.engine import Measured, by_rank
from dlprof.errors import NotMeasured
from dlprof.measures import settings
from dlprof.measures.arithmetic import allows_tf32
from dlprof.measures.breakdown import breakdown, part_noise
from dlprof.measures.operators import operators, tensor_cores
from dlprof.measures.peaks import device_of, device_peaks
from dlprof.measures.products import TENSOR_SHARE
from dlprof.measures.replay import own_time, saving
from dlprof.result import Finding, Panel
from dlprof.timeline.steps import mean_step_ns, of_step, step_means
from dlprof.units import digits, duration, percent

# A line of code, but one that changes numbers: worth it from 5 % of the step on.
NOTABLE_SHARE = 0.05

MOST_ROWS = 12


def check(run: Measured) -> Finding | Clear:
    """Look at the products that use no tensor cores, and at what they would take there."""
    if settings.on_cpu(run):
        raise NotMeasured("the job trains on the CPU, and whether that has units for 16-bit products is not recorded")
    frame = run.frame(tensor_cores)
    took = by_rank(frame, "float32_ns")
    step = mean_step_ns(run)
    if max(took.values()) / step < NOTABLE_SHARE:
        unknown = frame["unknown_ns"].sum() / max(frame["kernel_ns"].sum(), 1.0)
        return Clear(
            f"products in float32 without tensor cores take {percent(max(took.values()) / step)} of the step; on what"
            f" {percent(unknown)} of the kernels' time is multiplied, their names do not tell"
        )
    worst = max(took, key=lambda r: took[r])
    name, peaks, _ = device_peaks(run.facts[worst], run.trace_facts[worst])
    saved = by_rank(frame, "fp32_saved_ns")
    if frame["fp32_saved_ns"].isna().any():
        raise NotMeasured(f"the peaks of {name or 'this device'} are not known")
    gain = saving(run, saved)
    if gain / step < NOTABLE_SHARE:
        return Clear(
            f"products in float32 take {percent(took[worst] / step)} of the step, but in 16 bits it would be only"
            f" {percent(gain / step)} shorter: the host launches no faster, or memory gives no more"
        )
    half = "bfloat16" if "bfloat16" in peaks else "float16"
    # AMD's matrix cores take float32 as it is.
    without = "" if "Instinct" in name else " without tensor cores"
    return Finding(
        title=f"Matrix products run in float32{without}",
        summary=f"Products and convolutions in float32 take {duration(took[worst])} of a step of {duration(step)} on"
        f" rank {worst}; {name} multiplies {digits(peaks[half] / peaks['float32'])} times as fast in {half}.",
        verdict=f"{percent(gain / step)} {of_step(run)} would be saved by multiplying in 16 bits.",
        noise_ns=part_noise(run, "computation"),
        saving_ns=gain,
        advice=_advice(run, worst, half, "tf32" in peaks),
        evidence=_evidence(run, worst),
        ranks=tuple(sorted(r for r, ns in saved.items() if ns >= saved[worst] / 2)),
        sure=f"Estimated at {percent(TENSOR_SHARE)} of the tensor cores' peak, no sooner than the host launches.",
    )


def _advice(run: Measured, rank: int, half: str, has_tf32: bool) -> tuple[str, ...]:
    facts = run.facts[rank]
    enabled = (facts.get("autocast") or {}).get("enabled")
    said = f" (autocast is {'on' if enabled else 'off'})" if enabled is not None else ""
    scaler = ", and a `GradScaler`" if half == "float16" else ""
    advice = [f'`with torch.autocast("cuda", torch.{half}):` around the forward pass{said}{scaler}']
    if has_tf32:
        advice += _tf32(run, rank)
    return tuple(advice)


def _tf32(run: Measured, rank: int) -> list[str]:
    """Name the settings that multiply float32 in TF32, by the names that the job's torch has for them."""
    matmul = run.facts[rank].get("matmul") or {}
    keeps = "which keeps float32 and multiplies in TF32"
    version = settings.torch_version(run, rank)
    if version is None or version < (2, 9):
        now = matmul.get("float32_precision")
        later = ' (from torch 2.9 `torch.backends.cuda.matmul.fp32_precision = "tf32"`)' if version is None else ""
        told = f' (is "{now}")' if now else ""
        lines = [f'or `torch.set_float32_matmul_precision("high")`{later}, {keeps}{told}']
        convolutions = "torch.backends.cudnn.allow_tf32 = True"
    else:
        now = matmul.get("matmul_fp32_precision")
        told = f' (is "{now}")' if now else ""
        lines = [f'or `torch.backends.cuda.matmul.fp32_precision = "tf32"`, {keeps}{told}']
        convolutions = 'torch.backends.cudnn.conv.fp32_precision = "tf32"'
    if not allows_tf32(matmul, True) and (matmul.get("cudnn_allow_tf32") is False or "conv_fp32_precision" in matmul):
        lines.append(f"`{convolutions}` for convolutions, which are now without")
    if "Instinct" in device_of(run.facts[rank], run.trace_facts[rank])[0]:
        lines[0] += ", with `HIPBLASLT_ALLOW_TF32=1` in the environment"
    return lines


def _evidence(run: Measured, rank: int) -> Panel:
    frame = run.frame(operators)
    mine = frame[(frame["rank"] == rank) & (frame["float32_ns"] > 0)].head(MOST_ROWS)
    rows = tuple(
        (str(o), str(s) or "–", digits(float(n)), duration(float(ns)))
        for o, s, n, ns in zip(mine["operator"], mine["shape"], mine["calls"], mine["float32_ns"], strict=True)
    )
    columns = ("operator", "shapes", "times a step", "in float32")
    return Panel("table", f"Products in float32 without tensor cores, a step of rank {rank}", rows, columns)


RULE = Rule(
    "fp32_matmul",
    "Products in float32",
    (breakdown, operators, own_time, step_means, tensor_cores),
    check,
    saves_from=("computation",),
)
