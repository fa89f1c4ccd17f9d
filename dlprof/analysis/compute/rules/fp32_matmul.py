"""Matrix products and convolutions run in float32, where the device has tensor cores.

Since Volta, NVIDIA's GPUs multiply 16-bit numbers on tensor cores, 8 to 16 times as fast as float32 without them, with
half of the memory traffic. From Ampere on tensor cores also take float32, with its mantissa cut to 10 bits (TF32).

CPUs of recent years have units for bfloat16 too: AMX, AVX-512 BF16 and Arm's.

Needs a trace of a GPU whose peaks are known. Kernels are recognised by their names; what multiplies on a unit that its
name does not show is left out. Products in TF32 count where 16 bits, which are twice as fast, would save as much. On a
CPU it needs a trace, and which units it has.

Saving: each such product as long as its FLOPs take at half of the peak in 16 bits (5 / 6 of a peak that is but twice
that of float32), or its bytes at half their number, whichever is longer; where the shapes are not known, as if it now
ran at the peak of float32. It is bounded by what the
host could launch sooner. What other operators gain by their halved traffic is not in it. On a CPU products and
convolutions gain what they did in other jobs under autocast: 2.5 times as fast with AMX, 1.7 with the others.

What to change: `torch.autocast("cuda", torch.bfloat16)` around the forward pass (with float16 also a `GradScaler`); or,
from Ampere on, TF32: `torch.backends.cuda.matmul.fp32_precision = "tf32"` for products and
`torch.backends.cudnn.conv.fp32_precision = "tf32"` for convolutions (before torch 2.9
`torch.set_float32_matmul_precision("high")` and `torch.backends.cudnn.allow_tf32 = True`). Use the names of one kind:
once the first of the new ones is set, `torch.get_float32_matmul_precision()` and
`torch.backends.cuda.matmul.allow_tf32` raise where the script, or a library, reads them. An AMD MI300 has it as XF32,
which PyTorch uses where `HIPBLASLT_ALLOW_TF32=1` is set as well.

On a CPU 16 bits stand under "If the training may change", after what leaves the numbers as they are: whoever trains
there mostly means to have these.
"""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from dlprof.analysis import settings
from dlprof.analysis.compute.cpu_work import TIMES, UNITS, cpu_float32, is_product
from dlprof.analysis.compute.operators import operators, tensor_cores
from dlprof.analysis.compute.peaks import device_peaks
from dlprof.analysis.compute.products import TENSOR_SHARE, autocast, own_functions, reached, tf32
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, by_rank, maybe, needs
from dlprof.analysis.estimate import LEAST_SHARE, Estimate, Explanation, Rule, worst
from dlprof.analysis.panel import table
from dlprof.analysis.step.savings import own_time, saving
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.units import digits, duration, percent

# A line of code, but one that changes numbers: worth it from 5 % of the step on.
NOTABLE_SHARE = 0.05

MOST_ROWS = 12

# What products now run in, as the peaks of a device are called.
FLOAT32, TF32 = "float32", "tf32"


def check(
    tensor_cores: Maybe[Frame] = maybe(tensor_cores),
    cpu_float32: Maybe[Frame] = maybe(cpu_float32),
    mean_step_ns: float = needs(mean_step_ns),
    own_time: Frame = needs(own_time),
    job: Job = needs(JOB),
) -> Estimate:
    on_cpu = settings.on_cpu(job)
    frame = (cpu_float32 if on_cpu else tensor_cores).get()
    if on_cpu and not frame["unit"].any():
        raise DoesNotApply("this CPU has no units for 16-bit products: in 16 bits they would be slower")
    took, saved = by_rank(frame, "float32_ns"), by_rank(frame, "fp32_saved_ns")
    cut = by_rank(frame, "tf32_saved_ns") if not on_cpu and frame["tf32_saved_ns"].notna().all() else {}
    rank, known = worst(took), bool(frame["fp32_saved_ns"].notna().all())
    share = took[rank] / mean_step_ns
    summary = f"products in float32{'' if on_cpu else ' without tensor cores'} take {percent(share)} of the step"
    if share < NOTABLE_SHARE and on_cpu:
        return Estimate(saving_ns=saving(own_time, saved), by_rank_ns=saved, summary=summary, clear=True)
    if share < NOTABLE_SHARE and (gain := saving(own_time, cut) if cut else 0.0) >= NOTABLE_SHARE * mean_step_ns:
        return Estimate(
            saving_ns=gain,
            by_rank_ns=cut,
            noise_of=("computation",),
            loses="would be saved by multiplying in 16 bits instead of TF32",
            seen=(worst(cut), TF32),
        )
    if share < NOTABLE_SHARE:
        unknown = frame["unknown_ns"].sum() / max(frame["kernel_ns"].sum(), 1.0)
        if unknown >= LEAST_SHARE:
            summary += f"; {percent(unknown)} of the kernels' time may be such products too, by their names"
        most = saved if known else took
        return Estimate(saving_ns=saving(own_time, most), by_rank_ns=most, summary=summary, clear=True)
    if not known:
        name = device_peaks(job.facts[rank], job.trace_facts[rank])[0]
        raise NotMeasured(f"the peaks of {name or 'this device'} are not known")
    saved = {r: ns + cut.get(r, 0.0) for r, ns in saved.items()}
    gain = saving(own_time, saved)
    return Estimate(
        saving_ns=gain,
        by_rank_ns=saved,
        noise_of=("computation",),
        loses="would be saved by multiplying in 16 bits",
        summary=f"{summary}, but in 16 bits it would be only {percent(gain / mean_step_ns)} shorter: the host launches"
        " no faster, or memory is the limit",
        seen=(rank, FLOAT32),
    )


def explain(
    estimate: Estimate,
    tensor_cores: Maybe[Frame] = maybe(tensor_cores),
    cpu_float32: Maybe[Frame] = maybe(cpu_float32),
    mean_step_ns: float = needs(mean_step_ns),
    operators: Frame = needs(operators),
    own_functions: Frame = needs(own_functions),
    job: Job = needs(JOB),
) -> Explanation:
    (rank, kind), on_cpu = estimate.seen, settings.on_cpu(job)
    name, peaks, _ = device_peaks(job.facts[rank], job.trace_facts[rank])
    half = "bfloat16" if on_cpu or "bfloat16" in peaks else "float16"
    # AMD's matrix cores take float32 as it is.
    without = "" if on_cpu or "Instinct" in name else " without tensor cores"
    took = (cpu_float32 if on_cpu else tensor_cores).get()
    mine = operators[operators["rank"] == rank].replace("", np.nan)
    if on_cpu:
        unit = took.loc[took["rank"] == rank, "unit"].iloc[0]
        name, times = f"this CPU, with {UNITS[unit]},", TIMES[unit]
        mine = mine[mine["operator"].map(is_product).astype(bool)].assign(float32_ns=mine["ns"])
    else:
        times = peaks[half] / peaks[kind]
    if kind == TF32:
        mine = mine.assign(float32_ns=mine["tf32_ns"])
        took = took.assign(float32_ns=took["tf32_ns"])
    convolutions = mine["operator"].str.contains("conv")
    of_convolutions = mine.loc[convolutions, "float32_ns"].sum() / max(mine["float32_ns"].sum(), 1.0)
    share = TENSOR_SHARE if on_cpu or kind == TF32 else reached(peaks[half], peaks[kind])
    inside = "in TF32" if kind == TF32 else f"in float32{without}"
    return Explanation(
        title=f"Matrix products run {inside}",
        summary=f"Products and convolutions {inside} take {duration(by_rank(took, 'float32_ns')[rank])} of a"
        f" step of {duration(mean_step_ns)} on rank {rank}; {name} multiplies {digits(times)} times as fast in {half}.",
        changes=(
            # Who trains on a CPU seldom means other numbers: there it stands apart from what changes none.
            replace(autocast(job, rank, half, [*own_functions["function"]]), training=on_cpu),
            *(tf32(job, rank, name, of_convolutions) if "tf32" in peaks and kind == FLOAT32 else ()),
        ),
        evidence=table(
            f"Products {inside}, a step of rank {rank}",
            mine[mine["float32_ns"] > 0],
            {"operator": "operator", "shape": "shapes", "calls": "times a step", "float32_ns": "take_ns"},
            MOST_ROWS,
        ),
        sure="Estimated from other jobs; small products gain less, large ones more: `dlprof try` measures it."
        if on_cpu
        else f"Estimated at {percent(share)} of the tensor cores' peak, no sooner than the host launches.",
    )


# What is left of the products is small beside what they take now, and that alone is uncertain.
RULE = Rule("Products in float32", check, explain, saves_from=("computation",), notable=NOTABLE_SHARE, error=0.12)
