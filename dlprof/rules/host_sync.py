"""The script waits for its device, and the device then waits for the script.

A host that runs ahead keeps its device busy: kernels are queued long before they run. `.item()`, `.cpu()`, `print` of a
tensor, a boolean mask as an index, copying from pageable memory and `torch.cuda.synchronize()` stop the host until all
that is queued has run. When it goes on, the queue is empty, and the device has nothing to do until the host has
launched again.

Needs a trace of a device that links launches to kernels. A wait counts where the device ran dry meanwhile. Waiting for
copies to the device is the business of `blocking_copy` and `pageable_copy`.

Saving: the traced steps replayed with nobody waiting there: the host launches on, and the device works no sooner than
it launches. It is part of what `host_bound` finds, with a cause.

With an optimizer that is not fused, `torch.amp.GradScaler` reads a value itself in every step, right before the
optimizer's: that is told apart from what the script reads.

What to change: read values every k steps, or a step late; add up in tensors and read the sum; `torch.where` instead of
masks; pinned memory and `non_blocking=True` for copies; no `torch.cuda.synchronize()` in the loop; `fused=True` in the
optimizer behind a `GradScaler`.
"""

from __future__ import annotations

import pandas as pd

from dlprof.diagnosis import Clear, Rule
from dlprof.engine import Measured
from dlprof.errors import NotMeasured
from dlprof.measures import grad_scaler, settings
from dlprof.measures.breakdown import breakdown, part_least, part_noise
from dlprof.measures.replay import own_time, saving
from dlprof.measures.syncs import syncs, together
from dlprof.result import Finding, Panel
from dlprof.timeline.steps import mean_step_ns, of_step, step_means
from dlprof.units import digits, duration, percent

# Reading a value less often is one line, so it is worth saying from where any finding is (diagnosis.LEAST_SHARE).
NOTABLE_SHARE = 0.02

_HOST = ("host", "optimizer_host")

_CURES = {
    "aten::item": "read values (`.item()`, `float(loss)`, `print`) every k steps, or add up in a tensor and read that",
    "aten::_local_scalar_dense": "read values (`.item()`, `float(loss)`, `print`) every k steps",
    "aten::is_nonzero": "no `if` on a tensor of the device: `torch.where`, or decide on the host",
    "aten::nonzero": "no boolean masks as indices: their size must be known on the host; `torch.where` needs none",
    "aten::index": "no boolean masks as indices: their size must be known on the host; `torch.where` needs none",
    "aten::to": "`pin_memory=True` and `.to(device, non_blocking=True)`; `.cpu()` every k steps",
    "aten::_to_copy": "`pin_memory=True` and `.to(device, non_blocking=True)`; `.cpu()` every k steps",
    "aten::copy_": "copy from and to pinned memory, with `non_blocking=True`",
    "": "no `torch.cuda.synchronize()` in the loop, nor timing that needs it",
    # torch/amp/grad_scaler.py, `_maybe_opt_step`: what the optimizer takes itself is not read back.
    grad_scaler.READS: "`fused=True` in the optimizer (Adam, AdamW, SGD, Adagrad): it takes the scale itself, and"
    " `GradScaler.step` need not read back whether gradients overflowed; or bfloat16, which needs no GradScaler",
}


def check(run: Measured) -> Finding | Clear:
    """Look at the device's idle time behind such waits, and at what the job would gain without."""
    if settings.on_cpu(run):
        raise NotMeasured("the job trains on the CPU, where reading a value waits for nothing")
    if (run.frame(step_means)["unit"] != "step").any():
        raise NotMeasured("nothing marks the steps: starting up cannot be told from training (prof.step() marks them)")
    frame = run.frame(syncs)
    if len(frame) and frame["together_ns"].isna().all():
        raise NotMeasured("the trace does not link launches to kernels, or holds no work of a device")
    frame = frame[frame["copied"] == ""]
    gains = together(run, frame)
    step = mean_step_ns(run)
    gain = saving(run, gains)
    if gain / step < NOTABLE_SHARE:
        return Clear(f"for {percent(gain / step)} of the step the device idles behind a wait of its host")
    worst = max(gains, key=lambda r: gains[r])
    mine = frame[frame["rank"] == worst].sort_values("idle_ns", ascending=False)
    first = mine.iloc[0]
    who = "GradScaler" if first["asked"] == grad_scaler.READS else "the script"
    return Finding(
        title=f"{who[0].upper()}{who[1:]} waits for its device",
        summary=f"{digits(float(mine['calls'].sum()))} times a step rank {worst} waits until its device has caught up,"
        f" most of all in {first['asked'] or 'a call of Python'}; the device then idles for"
        f" {duration(float(mine['idle_ns'].sum()))} a step.",
        verdict=f"{percent(gain / step)} {of_step(run)} the device idles because {who} waited for it.",
        noise_ns=part_noise(run, *_HOST),
        least_ns=min(gain, part_least(run, *_HOST)),
        saving_ns=gain,
        advice=tuple(dict.fromkeys(_CURES[a] for a in mine.loc[mine["idle_ns"] > 0, "asked"] if a in _CURES))
        or ("find the calls that the report lists, and make them less often",),
        evidence=_evidence(mine, worst),
        ranks=tuple(sorted(r for r, ns in gains.items() if ns >= gains[worst] / 2)),
        sure="Estimated by replaying the traced steps without these waits.",
    )


def _evidence(mine: pd.DataFrame, rank: int) -> Panel:
    rows = tuple(
        (str(asked) or "Python", str(call), digits(float(n)), *(duration(float(ns)) for ns in times))
        for asked, call, n, *times in zip(
            *(mine[c] for c in ("asked", "call", "calls", "ns", "idle_ns", "gain_ns")), strict=True
        )
    )
    columns = ("by", "waits in", "times a step", "waiting a step", "device then idle", "saved without")
    return Panel("table", f"Waits of a traced step on rank {rank}", rows, columns)


RULE = Rule(
    "host_sync",
    "Waiting for the device",
    (breakdown, own_time, step_means, syncs),
    check,
    saves_from=("input_wait", "host", "optimizer_host", "launch_latency"),
)
