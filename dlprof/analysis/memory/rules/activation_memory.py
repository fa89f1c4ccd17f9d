"""Activations fill the GPU's memory, and so keep the batch too small for the device.

What the forward pass keeps for the backward pass grows with the batch, and often is most of what memory holds. Where
the device waits for its host or only exchanges data, a larger batch would make training faster, and there is no room
for it: unless fewer activations are kept.

Needs what was counted of a step's memory (held.json), the readings of PyTorch's CUDA allocator, and a trace.

Saving: for as many samples as a step has now, as `memory_headroom` predicts it, of the largest batch that fits once
fewer activations are kept. With checkpoints the forward pass is computed once more in that replay, a third of the
computation and of its launches, which is the most that they can cost. Of the ways that are open here the one that saves
most is named first: checkpoints of the layers that repeat, 16 bits for what is float32, fused attention where its
scores are kept.

What to change: `torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)` around each of the named layers,
`torch.autocast`, or `scaled_dot_product_attention`, and then the batch size, with the learning rate to match.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.engine import Frame, Job, Maybe
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.memory.batches import HOST, even, gain_at, most_times
from dlprof.analysis.panel import table
from dlprof.analysis.step.breakdown import part_noise
from dlprof.units import digits, duration, percent, size

# Another batch is another training: from where `memory_headroom` speaks.
NOTABLE_SHARE = 0.05

_ROOM = 1.25  # a batch so many times as large fits already: then nothing is in its way

_WAYS = ("checkpoint", "autocast", "fused_attention")

_COLUMNS = {"what": "change", "then_bytes": "peak for the present batch_bytes", "times": "then fits: times the batch"}
_COLUMNS |= {"step_ns": "time for as many samples as now_ns", "speed": "samples a second_times"}


def check(
    memory_changes: Frame,
    memory_composition: Frame,
    batch_room: Frame,
    larger_batch_steps: Maybe[Frame],
    same_for_any_batch: Maybe[dict[int, float]],
    breakdown: Maybe[Frame],
    mean_step_ns: float,
    job: Job,
) -> Estimate:
    """Find the way to keep fewer activations after which the batch that then fits is fastest for each sample."""
    kept, most = activations(memory_composition)
    if not most:
        return nothing(f"activations are {percent(kept)} of what memory holds at its peak, and not its largest part")
    room = most_times(batch_room)
    if room >= _ROOM:
        return nothing(f"a batch {digits(room)} times as large fits as it is: see memory_headroom")
    steps, batch = larger_batch_steps.get(), settings.training_loader(job).get("batch_size")
    rows: list[dict[str, Any]] = []
    for way, mine in memory_changes[memory_changes["change"].isin(_WAYS)].groupby("change", sort=False):
        times = even(float(mine["times"].min()), batch)
        if times > 1:
            gain = gain_at(steps, times, "again_ns" if way == "checkpoint" else "gain_ns")
            worst = mine.iloc[int(mine["now_bytes"].to_numpy().argmax())]
            row = {"change": way, "modules": worst["value"], "then_bytes": worst["then_bytes"], "times": times}
            rows.append(row | {"gain_ns": gain})
    ways = pd.DataFrame(rows, columns=["change", "modules", "then_bytes", "times", "gain_ns"])
    if not len(ways):
        return nothing("no way is known here to keep fewer activations")
    ways = ways.sort_values("gain_ns", ascending=False, kind="stable").reset_index(drop=True)
    gain, times = max(float(ways["gain_ns"].iloc[0]), 0.0), float(ways["times"].iloc[0])
    return Estimate(
        saving_ns=gain,
        by_rank_ns=dict.fromkeys(same_for_any_batch.get(), gain),
        noise_ns=part_noise(breakdown.get(), *HOST, "communication") * (1 - 1 / times),
        loses="would be saved by a larger batch, for which activations leave no room",
        seen=ways.assign(step_ns=mean_step_ns - ways["gain_ns"], speed=mean_step_ns / (mean_step_ns - ways["gain_ns"])),
    )


def activations(memory_composition: Frame) -> tuple[float, bool]:
    """Return the share of the peak that activations are, on the GPU on which that is most, and whether nothing else is
    more.
    """
    on_gpu = memory_composition[memory_composition["device"] != "cpu"]
    found = (0.0, False)
    for _, mine in on_gpu.groupby(["rank", "device"], sort=False):
        sizes = mine.set_index("part")["bytes"]
        kept = float(sizes.get("activation", 0.0))
        found = max(found, (kept / float(sizes.sum()), kept >= float(sizes.max())))
    return found


def explain(estimate: Estimate, memory_composition: Frame, job: Job) -> Explanation:
    """Name the way and the batch that then fits."""
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
        text = f"{way(row)}, and {more}: a step for as many samples is then {duration(row['step_ns'])}"
        changes.append(change(text, numerics=True, **larger))
    held = memory_composition[memory_composition["part"] == "activation"]
    most = held.iloc[int(held["bytes"].to_numpy().argmax())]
    return Explanation(
        title="Activations leave no room for a batch that the device would be faster with",
        summary=f"On rank {most['rank']} activations are {size(most['bytes'])} at the peak,"
        f" {percent(activations(memory_composition)[0])} of what is held, and no batch fits that is a quarter"
        f" larger. With fewer of them kept, one {digits(ways['times'].iloc[0])} times as large does.",
        changes=tuple(changes),
        evidence=table(
            "What keeping fewer activations is predicted to give",
            ways.assign(what=[way(row).replace("`", "") for row in ways.to_dict("records")]),
            _COLUMNS,
        ),
        sure="Predicted from what was counted of one step. Checkpoints are taken to cost a whole forward pass, the"
        " most that they can; autocast to compute no faster than now. Whether the model trains as well is not known.",
    )


def way(row: Any) -> str:
    """Return how to keep fewer activations, in words."""
    if row["change"] == "checkpoint":
        return f"`torch.utils.checkpoint` around `{row['modules']}`"
    return {"autocast": "autocast to 16 bits", "fused_attention": "fused attention"}[row["change"]]


# Of computation: the optimizer's, and what a kernel takes that computes next to nothing.
_SAVES_FROM = (*HOST, "communication", "computation")
RULE = Rule(
    "Activations that keep the batch small", check, explain, _SAVES_FROM, notable=NOTABLE_SHARE, only_with="gpu"
)
