"""The GPU's memory is nearly full, or has room for the larger batch that would fill the GPU.

Launches, Python and waiting take the same time for any batch. Where the device waits for its host, a larger batch gives
it more to do meanwhile; from some size on it works all the time, and a still larger batch saves nothing. A job that
uses nearly all memory fails on the first batch that is a little longer.

Needs the readings of PyTorch's CUDA allocator, and a trace that links launches to kernels.

Saving: per sample, the traced steps replayed with the batch with which the GPU works for nine tenths of the step.
Kernels, copies, waits for data and the script's own Python take so many times as long; calls of the host, the optimizer
and exchanges stay. The higher efficiency of larger kernels is not counted. Nothing is reported if the GPU works so
much already, if eight times the batch would not fill it, or if the batch that fills it does not fit. Activations,
inputs and temporary memory grow with the batch, as counted in one step; without a count, all memory that a step frees.

What to change: if the training may change, the batch size, and the learning rate with it (a larger batch trains
differently: compare the loss by samples, not by steps). Near the limit: a smaller batch, `torch.utils.checkpoint`, a
lower precision, `PYTORCH_ALLOC_CONF=expandable_segments:True` (before torch 2.9 `PYTORCH_CUDA_ALLOC_CONF`).
"""

from __future__ import annotations

import math
from typing import Any

from dlprof.analysis import settings
from dlprof.analysis.compute.kernels import TIMES, larger_batches
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.memory.changes import (
    HIGH,
    HOST,
    batch_memory,
    batch_need,
    even,
    gain_at,
    larger_batch_steps,
    up_to,
)
from dlprof.analysis.memory.memory import memory_use
from dlprof.analysis.panel import table
from dlprof.analysis.settings import EXPANDABLE
from dlprof.analysis.step.breakdown import breakdown, part_noise
from dlprof.analysis.step.throughput import throughput
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.errors import NotMeasured
from dlprof.result.figures import Throughput
from dlprof.units import duration, is_now, percent, size

# Memory monitors warn above 92 % (batches.HIGH), and again above 97 %. Reserved memory may be cache, so the first limit
# is for allocated memory, the second for reserved memory.
CRITICAL = 0.97

# A different batch size changes training: as high as the thresholds for input and stragglers (5 %, XProf).
NOTABLE_SHARE = 0.05

_LARGER = {"times": "times the batch", "step_ns": "same samples_ns", "need": "memory_share", "speed": "speed_times"}
_HELD = {"rank": "rank", "peak_allocated_bytes": "peak allocated_bytes", "peak_reserved_bytes": "peak reserved_bytes"}
_HELD |= {"total_bytes": "GPU memory_bytes", "reserved": "reserved_share"}


def check(
    memory_use: Frame = needs(memory_use),
    batch_memory: Frame = needs(batch_memory),
    larger_batch_steps: Maybe[Frame] = maybe(larger_batch_steps),
    larger_batches: Maybe[Frame] = maybe(larger_batches),
    breakdown: Maybe[Frame] = maybe(breakdown),
    job: Job = needs(JOB),
) -> Estimate:
    gpus = memory_use[memory_use["total_bytes"] > 0]
    if not len(gpus):
        raise NotMeasured("how much memory the GPU has was not recorded (record with `dlprof wrap`)")
    gpus = gpus.assign(reserved=gpus["peak_reserved_bytes"] / gpus["total_bytes"])
    used = batch_need(batch_memory, 1)
    if used > HIGH or gpus["reserved"].max() > CRITICAL:
        full = dict.fromkeys(gpus.loc[gpus["reserved"] > HIGH, "rank"].tolist(), 1.0)
        return Estimate(scope="risk", by_rank_ns=full, seen=gpus)
    fills = float(larger_batches.get()["fills"].max(skipna=False))
    if math.isnan(fills):
        return nothing(f"up to {TIMES[-1]:g} times the batch the GPU would still wait for its host or for data")
    times = even(fills, settings.training_loader(job).get("batch_size"))
    if times <= 1:
        return nothing("the GPU works for nine tenths of the step, or nearly: a larger batch would save little")
    if (need := batch_need(batch_memory, times)) > HIGH:
        return nothing(f"a batch that fills the GPU, {_times(times)} as large, needs {percent(need)} of its memory")
    gain = gain_at(larger_batch_steps.get(), times)
    return Estimate(
        saving_ns=gain,
        by_rank_ns=dict.fromkeys(gpus["rank"].tolist(), gain),
        noise_ns=part_noise(breakdown.get(), *HOST, "communication") * (1 - 1 / times),
        loses=f"would be saved by a batch {_times(times)} as large",
        seen=times,
    )


def explain(
    estimate: Estimate,
    batch_memory: Frame = needs(batch_memory),
    larger_batch_steps: Maybe[Frame] = maybe(larger_batch_steps),
    larger_batches: Maybe[Frame] = maybe(larger_batches),
    mean_step_ns: Maybe[float] = maybe(mean_step_ns),
    throughput: Maybe[Throughput] = maybe(throughput),
    job: Job = needs(JOB),
) -> Explanation:
    if estimate.scope == "risk":
        return _nearly_full(estimate.seen, batch_need(batch_memory, 1), job)
    times, step, samples = estimate.seen, mean_step_ns.get(), throughput.or_none()
    batch = settings.training_loader(job, estimate.worst).get("batch_size")
    text, larger = f"a batch {_times(times)} as large", dict[str, Any]()
    if isinstance(batch, int):
        text, larger = f"`batch_size={times * batch:.0f}` (is {batch})", {"batch_size": (batch, round(times * batch))}
    elif samples is not None and (now := samples.samples_per_step):
        text += f" ({times * now:,.0f} samples a step, now {now:,.0f})"
    text += f", with the learning rate to match: as many samples as now take {duration(step - estimate.saving_ns)}"
    counted = "counted by part" if (batch_memory["counted"] == 1).all() else "read from the allocator"
    return Explanation(
        title="A larger batch would fit, and fill the GPU",
        summary=f"For {percent(larger_batches.get()['wait_share'].max())} of the {duration(step)} step the GPU waits."
        f" With a batch {_times(times)} as large, which needs {percent(batch_need(batch_memory, times))} of its memory,"
        " it works for nine tenths of the step and limits it: a still larger batch would save little.",
        changes=(change(text, numerics=True, training=True, **larger),),
        evidence=table("With larger batches", up_to(larger_batch_steps.get(), batch_memory, step, times), _LARGER),
        sure="Predicted by replaying the traced steps. Assumes that kernels, copies, waits for data and the script's"
        f" own Python grow with the batch, and the host's calls and exchanges do not. Memory was {counted}. Whether the"
        " model trains as well is not known.",
    )


def _times(times: float) -> str:
    return "twice" if times == 2 else f"{times:.3g} times"


def _nearly_full(gpus: Frame, used: float, job: Job) -> Explanation:
    shares = gpus["peak_allocated_bytes" if used > HIGH else "peak_reserved_bytes"] / gpus["total_bytes"]
    mine = gpus.iloc[[int(shares.argmax())]].to_dict("records")[0]
    rank, held, most, total = (mine[c] for c in ("rank", "peak_allocated_bytes", "peak_reserved_bytes", "total_bytes"))
    batch = settings.training_loader(job, rank).get("batch_size")
    variable, conf = settings.allocator(job, rank)
    cache = f"`{variable}={EXPANDABLE}` (is {conf or 'not set'}): {size(most - held)} of the reserved memory is cache"
    failed = f"; {mine['ooms']:.0f} allocations failed" if mine["ooms"] > 0 else ""
    shown = gpus.sort_values("peak_reserved_bytes", ascending=False, kind="stable")
    return Explanation(
        title="The GPU's memory is nearly full",
        summary=f"At the peak, rank {rank} had {size(held)} of {size(total)} allocated and {size(most)}"
        f" ({percent(most / total)}) reserved{failed}.",
        verdict=f"{percent(max(most, held) / total)} of the GPU's memory was in use: a longer batch may crash the job.",
        changes=(
            change(f"a smaller batch{is_now(batch)}", numerics=True),
            change("`torch.utils.checkpoint` around the largest blocks"),
            change(cache, numerics=False, training=False, **{variable: (conf, EXPANDABLE)}),
        ),
        evidence=table("Peak memory of each GPU", shown, _HELD, most=16),
        sure="Read from PyTorch's allocator a few times a second. Memory of other libraries comes on top.",
    )


# Computation that a larger batch does not lengthen: the optimizer's, and the fixed cost of kernels.
_SAVES_FROM = (*HOST, "communication", "computation")
RULE = Rule("GPU memory", check, explain, _SAVES_FROM, notable=NOTABLE_SHARE, only_with="gpu")
