"""The GPU's memory is nearly full, or so empty that a larger batch would fit and make training faster.

Host work and gradient exchange take the same time for any batch. Where the device waits for either, twice the batch
halves that time per sample; where it computes all the time, a larger batch saves nothing. A job that uses nearly all
memory fails on the first batch that is a little longer.

Needs the readings of PyTorch's CUDA allocator, and a trace, which shows what the device waits for.

Saving: per sample, the traced steps replayed with a larger batch: kernels and copies take so many times as long, while
host work, the optimizer and exchanges stay. The higher efficiency of larger kernels is not counted. Without a replay:
that share of the time in which the device waits for its host or only exchanges data. The advice is the smallest batch
that saves nearly as much as the largest that fits. Activations, inputs and temporary memory grow with the batch, as
counted in one step; without a count, all memory that a step frees.

What to change: the batch size, and the learning rate with it (a larger batch trains differently: compare the loss by
samples, not by steps). Near the limit: a smaller batch, `torch.utils.checkpoint`, a lower precision,
`PYTORCH_ALLOC_CONF=expandable_segments:True` (before torch 2.9 `PYTORCH_CUDA_ALLOC_CONF`).
"""

from __future__ import annotations

from typing import Any

from dlprof.analysis import settings
from dlprof.analysis.engine import Frame, Job, Maybe
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.memory.batches import HIGH, HOST, batch_need
from dlprof.analysis.panel import table
from dlprof.analysis.settings import EXPANDABLE
from dlprof.analysis.step.breakdown import part_noise
from dlprof.errors import NotMeasured
from dlprof.units import digits, duration, is_now, percent, size

# Memory monitors warn above 92 % (batches.HIGH), and again above 97 %. Reserved memory may be cache, so the first limit
# is for allocated memory, the second for reserved memory.
CRITICAL = 0.97

# The smallest batch is advised that gives this share of what the largest one does: a larger batch trains differently.
_NEARLY = 0.95

# A different batch size changes training: as high as the thresholds for input and stragglers (5 %, XProf).
NOTABLE_SHARE = 0.05

_LARGER = {"times": "times the batch", "size": "batch size", "step_ns": "time for the same samples_ns"}
_LARGER |= {"need": "peak memory_share", "speed": "samples a second_times"}
_HELD = {"rank": "rank", "peak_allocated_bytes": "peak allocated_bytes", "peak_reserved_bytes": "peak reserved_bytes"}
_HELD |= {"total_bytes": "GPU memory_bytes", "reserved": "reserved_share"}


def check(
    memory_use: Frame,
    batch_room: Frame,
    larger_batch_steps: Maybe[Frame],
    same_for_any_batch: Maybe[dict[int, float]],
    breakdown: Maybe[Frame],
) -> Estimate:
    gpus = memory_use[memory_use["total_bytes"] > 0]
    if not len(gpus):
        raise NotMeasured("how much memory the GPU has was not recorded (record with `dlprof wrap`)")
    gpus = gpus.assign(reserved=gpus["peak_reserved_bytes"] / gpus["total_bytes"])
    used = batch_need(batch_room, 1)
    if used > HIGH or gpus["reserved"].max() > CRITICAL:
        full = dict.fromkeys(gpus.loc[gpus["reserved"] > HIGH, "rank"].tolist(), 1.0)
        return Estimate(scope="risk", by_rank_ns=full, seen=gpus)
    steps = larger_batch_steps.get()
    fits = steps[(steps["times"] > 1) & (steps["need"] <= HIGH)]
    if not len(fits):
        return nothing(f"{percent(used)} of the GPU's memory is used; no larger batch would fit")
    chosen = fits[fits["gain_ns"] >= _NEARLY * fits["gain_ns"].max()].iloc[0]
    gain, times = float(chosen["gain_ns"]), float(chosen["times"])
    return Estimate(
        saving_ns=gain,
        by_rank_ns=dict.fromkeys(same_for_any_batch.get(), gain),
        noise_ns=part_noise(breakdown.get(), *HOST, "communication") * (1 - 1 / times),
        loses=f"would be saved by a batch {_times(times)} as large",
        seen=(gpus, chosen.to_dict()),
    )


def explain(
    estimate: Estimate,
    batch_room: Frame,
    larger_batch_steps: Maybe[Frame],
    same_for_any_batch: Maybe[dict[int, float]],
    mean_step_ns: Maybe[float],
    job: Job,
) -> Explanation:
    if estimate.scope == "risk":
        return _nearly_full(estimate.seen, batch_need(batch_room, 1), job)
    gpus, chosen = estimate.seen
    mine = _fullest(gpus, "peak_allocated_bytes")
    steps = larger_batch_steps.get()
    fits = steps[steps["need"] <= HIGH]
    batch = settings.training_loader(job, mine["rank"]).get("batch_size")
    text, larger = f"a batch {_times(chosen['times'])} as large", dict[str, Any]()
    if isinstance(batch, int):
        text, larger = f"`batch_size={chosen['size']:.0f}` (is {batch})", {"batch_size": (batch, round(chosen["size"]))}
    text += f", with the learning rate to match: as many samples as now then take {duration(chosen['step_ns'])}"
    most, counted = fits.iloc[-1], (batch_room["counted"] == 1).all()
    largest = f"{most['size']:,.0f} samples" if isinstance(batch, int) else f"{_times(most['times'])} as large"
    return Explanation(
        title="A larger batch would fit and be faster",
        summary=f"Rank {mine['rank']} allocates at most {size(mine['peak_allocated_bytes'])} of"
        f" {size(mine['total_bytes'])}. For {duration(max(same_for_any_batch.get().values()))} of the"
        f" {duration(mean_step_ns.get())} step the device waits for its host or only exchanges data, which takes as"
        f" long for any batch. The largest batch known to fit is {largest}, with {percent(most['need'])} of the"
        " memory.",
        changes=(change(text, numerics=True, **larger),),
        evidence=table("Predicted with larger batches", fits, _LARGER),
        sure="Predicted. Assumes that computation grows with the batch, and that the host's work and the exchanges do"
        f" not. Memory was {'counted by part' if counted else 'read from the allocator'}. Whether the model trains as"
        " well is not known.",
    )


def _times(times: float) -> str:
    return "twice" if times == 2 else f"{digits(times)} times"


def _fullest(gpus: Frame, column: str) -> dict[Any, Any]:
    """Return the GPU with the largest share of its memory in a column."""
    return gpus.iloc[[int((gpus[column] / gpus["total_bytes"]).argmax())]].to_dict("records")[0]


def _nearly_full(gpus: Frame, used: float, job: Job) -> Explanation:
    mine = _fullest(gpus, "peak_allocated_bytes" if used > HIGH else "peak_reserved_bytes")
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
            change(cache, numerics=False, **{variable: (conf, EXPANDABLE)}),
        ),
        evidence=table("Peak memory of each GPU", shown, _HELD, most=16),
        sure="Read from PyTorch's allocator a few times a second. Memory of other libraries comes on top.",
    )


# Of computation: the optimizer's, and the fixed cost of kernels.
_SAVES_FROM = (*HOST, "communication", "computation")
RULE = Rule("GPU memory", check, explain, _SAVES_FROM, notable=NOTABLE_SHARE, only_with="gpu")
