"""Activations fill the GPU's memory and keep the batch smaller than the device could use.

Activations, which the forward pass stores for the backward pass, grow with the batch and are often the largest part of
memory. Where the device waits for its host, or only exchanges data, a larger batch would make training faster, but it
fits only if fewer activations are stored.

Needs the memory that dlprof counted in one step (held.json), the readings of PyTorch's CUDA allocator, and a trace.

Saving: for as many samples as a step has now, as `memory_headroom` predicts it, with the batch that fills the GPU, or
the largest below it that fits once fewer activations are stored. With activation checkpointing the replay computes the
forward pass once more: a third of the computation and of its launches, the most that it can cost. The change that saves
most is named first: activation checkpointing of the repeated layers, autocast to 16 bits, or fused attention where
scores are stored.

What to change: `torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)` around each of the named layers,
`torch.autocast`, or `scaled_dot_product_attention`; then, if the training may change, the batch size, and the learning
rate with it.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.compute.kernels import larger_batches
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.memory.changes import (
    HOST,
    batch_memory,
    even,
    gain_at,
    larger_batch_steps,
    memory_changes,
    most_times,
)
from dlprof.analysis.memory.memory import memory_composition
from dlprof.analysis.panel import table
from dlprof.analysis.step.breakdown import breakdown, part_noise
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.units import digits, duration, percent, size

# A different batch size changes training: the same threshold as `memory_headroom`.
NOTABLE_SHARE = 0.05

_ROOM = 1.25  # where a batch so many times as large fits already, activations are not what limits it

_WAYS = ("checkpoint", "autocast", "fused_attention")

_COLUMNS = {
    "what": "change",
    "then_bytes": "peak with the present batch_bytes",
    "times": "largest batch that fits_times",
}
_COLUMNS |= {"step_ns": "time for the same samples_ns", "speed": "samples a second_times"}


def check(
    memory_changes: Frame = needs(memory_changes),
    memory_composition: Frame = needs(memory_composition),
    batch_memory: Frame = needs(batch_memory),
    larger_batch_steps: Maybe[Frame] = maybe(larger_batch_steps),
    larger_batches: Maybe[Frame] = maybe(larger_batches),
    breakdown: Maybe[Frame] = maybe(breakdown),
    mean_step_ns: float = needs(mean_step_ns),
    job: Job = needs(JOB),
) -> Estimate:
    """Find how to store fewer activations so that the batch that then fits is the fastest per sample."""
    kept, most = activations(memory_composition)
    if not most:
        return nothing(f"activations are {percent(kept)} of the peak memory, and not its largest part")
    fits = most_times(batch_memory)
    if fits >= _ROOM:
        return nothing(f"a batch {digits(fits)} times as large fits without changes: see memory_headroom")
    replayed, batch = larger_batches.get(), settings.training_loader(job).get("batch_size")
    largest = float(replayed["fills"].max(skipna=False))
    if not largest > 1:
        limits = "the GPU limits the step" if largest == 1 else "no batch is known to fill the GPU"
        return nothing(f"activations leave no room for a larger batch, but {limits}: one would save little")
    steps = larger_batch_steps.get()
    rows: list[dict[str, Any]] = []
    for way, mine in memory_changes[memory_changes["change"].isin(_WAYS)].groupby("change", sort=False):
        times = even(min(float(mine["times"].min()), largest), batch)
        if times > 1:
            gain = gain_at(steps, times, "again_ns" if way == "checkpoint" else "gain_ns")
            worst = mine.iloc[int(mine["now_bytes"].to_numpy().argmax())]
            row = {"change": way, "modules": worst["value"], "then_bytes": worst["then_bytes"], "times": times}
            rows.append(row | {"gain_ns": gain})
    ways = pd.DataFrame(rows, columns=["change", "modules", "then_bytes", "times", "gain_ns"])
    if not len(ways):
        return nothing("no change is known that stores fewer activations here")
    ways = ways.sort_values("gain_ns", ascending=False, kind="stable").reset_index(drop=True)
    gain, times = max(float(ways["gain_ns"].iloc[0]), 0.0), float(ways["times"].iloc[0])
    return Estimate(
        saving_ns=gain,
        by_rank_ns=dict.fromkeys(replayed["rank"].tolist(), gain),
        noise_ns=part_noise(breakdown.get(), *HOST, "communication") * (1 - 1 / times),
        loses="would be saved by a larger batch, which fits only with fewer activations",
        seen=ways.assign(step_ns=mean_step_ns - ways["gain_ns"], speed=mean_step_ns / (mean_step_ns - ways["gain_ns"])),
    )


def activations(memory_composition: Frame) -> tuple[float, bool]:
    """Return the share of activations in the peak, on the GPU where it is largest, and whether they are the largest
    part.
    """
    on_gpu = memory_composition[memory_composition["device"] != "cpu"]
    found = (0.0, False)
    for _, mine in on_gpu.groupby(["rank", "device"], sort=False):
        sizes = mine.set_index("part")["bytes"]
        kept = float(sizes.get("activation", 0.0))
        found = max(found, (kept / float(sizes.sum()), kept >= float(sizes.max())))
    return found


def explain(
    estimate: Estimate, memory_composition: Frame = needs(memory_composition), job: Job = needs(JOB)
) -> Explanation:
    """Name the change, and the batch that then fits."""
    ways = estimate.seen
    batch = settings.training_loader(job).get("batch_size")
    useful = ways[ways["gain_ns"] > 0]
    changes = []
    for row in useful.to_dict("records"):
        more = f"a batch {digits(row['times'])} times as large"
        larger: dict[str, Any] = {}
        if isinstance(batch, int):
            then = round(row["times"] * batch)
            more, larger = f"`batch_size={then}` (is {batch})", {"batch_size": (batch, then)}
        text = f"{way(row)}, and {more}: as many samples as now then take {duration(row['step_ns'])}"
        changes.append(change(text, numerics=True, training=True, **larger))
    held = memory_composition[memory_composition["part"] == "activation"]
    most = held.iloc[int(held["bytes"].to_numpy().argmax())]
    return Explanation(
        title="Activations leave no memory for a larger, faster batch",
        summary=f"On rank {most['rank']} activations take {size(most['bytes'])} at the peak,"
        f" {percent(activations(memory_composition)[0])} of the memory in use, and a batch a quarter larger does not"
        f" fit. With fewer activations, one {digits(ways['times'].iloc[0])} times as large does.",
        changes=tuple(changes),
        evidence=table(
            "Predicted with fewer activations",
            ways.assign(what=[way(row).replace("`", "") for row in ways.to_dict("records")]),
            _COLUMNS,
        ),
        sure="Predicted from the memory counted in one step. Assumes that checkpointing costs a whole forward pass, the"
        " most that it can, and that autocast computes no faster. Whether the model trains as well is not known.",
    )


def way(row: Any) -> str:
    """Return a change that stores fewer activations, in words."""
    if row["change"] == "checkpoint":
        return f"`torch.utils.checkpoint` around `{row['modules']}`"
    return {"autocast": "autocast to 16 bits", "fused_attention": "fused attention"}[row["change"]]


# Computation that a larger batch does not lengthen: the optimizer's, and the fixed cost of kernels.
_SAVES_FROM = (*HOST, "communication", "computation")
RULE = Rule(
    "Activations that keep the batch small", check, explain, _SAVES_FROM, notable=NOTABLE_SHARE, only_with="gpu"
)
