"""Activations are computed twice, although there is memory to keep them.

`torch.utils.checkpoint` keeps only the input of a block and computes the block again in the backward pass: a third of
the arithmetic more. That is the price for a batch or a model that would not fit otherwise. Where most of the memory is
free, nothing is bought for it.

Needs a trace with the names of modules, as dlprof records it, and on a GPU the readings of PyTorch's allocator, on a
CPU those of the host's memory. Whether the activations fit is known by a bound. On a GPU: what is kept is written once
forward, once again, and read at least once, so it is a third at most of the bytes that the operators of these modules
move. On a CPU: it is written while it is computed again, at no more than 100 GB/s.

Saving: on a GPU the traced steps replayed without what is computed again, and without what checkpointing does on the
host around it and before each block: it keeps the state of the random numbers, and hooks what is saved. On a CPU the
part of these modules in the traced steps, of what operators take in all steps.

What to change: no `checkpoint` around these blocks (transformers: `gradient_checkpointing=False`), or around fewer of
them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis import settings
from dlprof.analysis.compute.cpu_work import cpu_parts, cpu_work, in_all_steps
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, by_rank, maybe, needs, per_rank
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.host.gaps import SAVES_FROM
from dlprof.analysis.machine.samples import sample_means
from dlprof.analysis.memory.changes import HIGH
from dlprof.analysis.memory.memory import memory_use
from dlprof.analysis.modules.frames import BACKWARD, FORWARD, PARTS, RECOMPUTE, Frames, module_frames, module_rows
from dlprof.analysis.source.statements import Trees, statements, telling
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import device_work, has_device
from dlprof.analysis.timeline.paths import folded, parent
from dlprof.analysis.timeline.steps import Timing, timing
from dlprof.analysis.timeline.what_if import WhatIf, what_if
from dlprof.errors import NotMeasured
from dlprof.result import Panel
from dlprof.units import duration, size

# Written forward, written again, read: of what is kept, so many times its bytes are moved at least.
_MOVED = 3

_MOST_NAMES = 3

_LOSES = "is spent computing activations again, with enough memory free to keep them"

# What is left of the host's time for these blocks without the Python hooks that keep, drop and fetch each tensor that a
# function saves: 0.70 of forward and 0.55 of backward for transformers under autocast in torch 2.13 on a CPU, 0.30 to
# 0.59 and 0.28 to 0.49 for five other models.
_UNHOOKED = {FORWARD: 0.7, BACKWARD: 0.55}

# What a CPU may write, bytes a ns.
_WRITES = 100.0

# How scripts ask for it.
_ASKS = (
    "gradient_checkpointing_enable",
    "gradient_checkpointing",
    "set_grad_checkpointing",
    "checkpoint",
    "checkpoint_sequential",
)

# What torch.utils.checkpoint calls before each block, without use_reentrant.
_SAVES = "_NoopSaveInputs"


@per_rank
def recomputed(
    what_if: WhatIf = needs(what_if),
    module_rows: Frame = needs(module_rows),
    module_frames: Frames = needs(module_frames),
    spans: Frame = needs(schema.SPANS),
    device_work: Frame = needs(device_work),
    modules: Maybe[Frame] = maybe(schema.MODULES),
) -> Frame:
    """Return what is computed again in a mean steady step, one row: ns (of its kernels), gain_ns (how much shorter the
    step would be without), most_bytes (the most that keeping it takes; NaN: not counted), blocks (modules, as text).

    No row where nothing is.
    """
    again = module_frames.part == RECOMPUTE
    columns = ["ns", "gain_ns", "most_bytes", "blocks"]
    if not again.any():
        return pd.DataFrame(columns=columns)
    replay = what_if.replay
    part = module_rows["part"].cat.codes.to_numpy()[device_work.index.to_numpy()[replay.rows]]
    mine = part == PARTS.index("recompute")
    free = iv.merge(what_if.host.calls, what_if.host.python)
    times = iv.intersect(_around(module_frames, again, spans), free)
    places = [m for m in np.unique(module_frames.module[again]).tolist() if m >= 0]
    of_blocks = np.isin(module_frames.module, places)
    other = [(times, 0.0)]
    for kind, left in _UNHOOKED.items() if host.is_named(spans, _SAVES).any() else ():
        those = of_blocks & (module_frames.part == kind)
        hooked = iv.union(module_frames.start[those], module_frames.end[those])
        other.append((iv.subtract(iv.intersect(hooked, free), times), left))
    gain = what_if.gain_ns(durations=np.where(mine, -1, replay.durations), other=other)
    kinds = {module_frames.paths[m]: module_frames.classes[m] for m in places}
    table = modules.or_none()
    moved = np.nan if table is None else float(table.loc[table["path"].astype(str).isin(kinds), "moved_bytes"].sum())
    took = float(replay.durations[mine].sum()) / replay.steps
    return pd.DataFrame([(took, gain, moved / _MOVED, _named(kinds))], columns=columns)


@per_rank
def recomputed_on_cpu(
    has_device: bool = needs(has_device), module_frames: Frames = needs(module_frames), timing: Timing = needs(timing)
) -> pd.DataFrame:
    """Return the same of a CPU: ns (a traced step, as measured there), and blocks. No row where nothing is."""
    again = module_frames.part == RECOMPUTE
    if has_device or not again.any():
        return pd.DataFrame({"ns": [], "blocks": []})
    when = iv.union(module_frames.start[again], module_frames.end[again])
    ns = iv.total(iv.intersect(when, iv.merge(timing.windows))) / max(len(timing.windows), 1)
    places = [m for m in np.unique(module_frames.module[again]).tolist() if m >= 0]
    kinds = {module_frames.paths[m]: module_frames.classes[m] for m in places}
    return pd.DataFrame([(ns, _named(kinds))], columns=["ns", "blocks"])


def _named(kinds: Mapping[str, str]) -> str:
    """Return the outermost of these modules, as text."""
    names = folded(kinds)
    outermost = dict.fromkeys(names[path] for path in kinds if path in names and parent(path) not in kinds)
    return ", ".join([*outermost][:_MOST_NAMES])


def _around(frames: Frames, again: NDArray[np.bool_], spans: Frame) -> iv.Intervals:
    """Return when the host computes modules again, and when it keeps for that what they were given: between the modules
    around, or up to the next call.
    """
    lanes, start = spans["lane"].cat.codes.to_numpy(), spans["start_ns"].to_numpy()
    end = start + spans["dur_ns"].to_numpy()
    found = []
    for lane in np.unique(frames.lane[again]).tolist():
        mine, here = again & (frames.lane == lane), lanes == lane
        found.append(_widened(frames.start[mine], frames.end[mine], np.concatenate((start[here], end[here]))))
    saving = host.is_named(spans, _SAVES)
    for lane in np.unique(lanes[saving]).tolist():
        mine, calls = saving & (lanes == lane), frames.calls & (frames.lane == lane)
        found.append(_widened(start[mine], end[mine], np.concatenate((frames.start[calls], frames.end[calls]))))
    return iv.merge(*found)


def _widened(start: NDArray[np.int64], end: NDArray[np.int64], edges: NDArray[np.int64]) -> iv.Intervals:
    """Return stretches of time from the edge before each to the edge after it."""
    edges = np.sort(edges)
    before, after = np.searchsorted(edges, start) - 1, np.searchsorted(edges, end, side="right")
    within = (before >= 0) & (after < len(edges))
    return iv.union(
        np.where(within, edges[np.maximum(before, 0)], start),
        np.where(within, edges[np.minimum(after, len(edges) - 1)], end),
    )


def check(
    recomputed: Maybe[Frame] = maybe(recomputed),
    memory_use: Maybe[Frame] = maybe(memory_use),
    recomputed_on_cpu: Maybe[Frame] = maybe(recomputed_on_cpu),
    cpu_parts: Maybe[Frame] = maybe(cpu_parts),
    cpu_work: Maybe[Frame] = maybe(cpu_work),
    sample_means: Maybe[Frame] = maybe(sample_means),
    job: Job = needs(JOB),
) -> Estimate:
    on_cpu = settings.on_cpu(job)
    rows = (recomputed_on_cpu if on_cpu else recomputed).get()
    if rows.empty:
        return nothing("nothing is computed again in the backward pass")
    if on_cpu:
        took = in_all_steps(by_rank(rows, "ns"), cpu_parts.get(), cpu_work.get())
        means = sample_means.get()
        left = float(means.loc[means["metric"] == "memory_available_bytes", "mean"].min())
        if not _WRITES * sum(took.values()) <= left:
            return nothing("activations are computed again, and may not fit into memory")
        return Estimate(gone_ns=took, noise_of=("computation",), loses=_LOSES, seen=(rows, left))
    use = memory_use.get().set_index("rank")
    mine = rows.set_index("rank")
    total = use["total_bytes"].reindex(mine.index)
    needed = use["peak_reserved_bytes"].reindex(mine.index) + mine["most_bytes"]
    if needed.isna().any() or total.isna().any():
        raise NotMeasured("how much memory the activations would take was not counted (record with `dlprof wrap`)")
    fits = needed <= HIGH * total
    if not fits.all():
        return nothing("activations are computed again, and may not fit into the memory of the GPU")
    return Estimate(gone_ns=by_rank(rows, "gain_ns"), noise_of=("computation",), loses=_LOSES, seen=(rows, None))


def explain(
    estimate: Estimate, memory_use: Maybe[Frame] = maybe(memory_use), statements: Trees = needs(statements)
) -> Explanation:
    rows, free = estimate.seen
    row = estimate.rows(rows).iloc[0]
    if free is None:
        use = estimate.rows(memory_use.get()).iloc[0]
        ns, most, whose = row["ns"], float(row["most_bytes"]), "GPU"
        first = ("reserved at the peak", float(use["peak_reserved_bytes"]))
        free = use["total_bytes"] - first[1]
    else:
        ns, first, whose = estimate.saving_ns, ("free", free), "host"
        most = ns * _WRITES
    return Explanation(
        title="Activations are computed twice, with memory free to keep them",
        summary=f"Rank {estimate.worst} computes {row['blocks']} again in the backward pass, {duration(ns)} a step;"
        f" {size(free)} of the {whose}'s memory are free, and keeping the activations takes {size(most)} at most.",
        where=telling(statements, _ASKS),
        changes=(
            change(
                "take `torch.utils.checkpoint` from around these blocks (transformers: `gradient_checkpointing=False`)",
                gradient_checkpointing=(True, False),
            ),
        ),
        evidence=Panel(
            "bars",
            f"Memory of rank {estimate.worst}'s {whose}",
            (first, ("activations, at most", most)),
            unit="bytes",
        ),
        sure="Estimated by the traced steps without what is computed again.",
    )


_SAVES_FROM = ("computation", *SAVES_FROM)
RULE = Rule(
    "Activations computed twice",
    check,
    explain,
    _SAVES_FROM,
    error=0.3,  # what the hooks of each saved tensor take on the host, no trace shows
    of_host=True,
)
