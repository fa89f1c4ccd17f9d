"""The script waits for its device, and the device then waits for the script.

A host that runs ahead keeps its device busy: kernels are queued long before they run. `.item()`, `.cpu()`, `print` of a
tensor, a boolean mask as an index, copying from pageable memory and `torch.cuda.synchronize()` stop the host until all
that is queued has run. When it goes on, the queue is empty, and the device has nothing to do until the host has
launched again.

Needs a trace of a device. A wait counts where the device ran dry meanwhile: then for as long as the host took to launch
again, and not for the waiting itself, in which the device worked. What the device waited for anyway (the next batch,
another rank) is left out. Waiting for copies from pinned memory is the business of `blocking_copy`.

Saving: that idle time gone. It is part of what `host_bound` finds, with a cause.

What to change: read values every k steps, or a step late; add up in tensors and read the sum; `torch.where` instead of
masks; pinned memory and `non_blocking=True` for copies; no `torch.cuda.synchronize()` in the loop.
"""

from __future__ import annotations

import pandas as pd

from dlprof.diagnosis import Clear, Rule
from dlprof.engine import Measured
from dlprof.errors import NotMeasured
from dlprof.measures import settings
from dlprof.measures.breakdown import breakdown, part, part_noise
from dlprof.measures.replay import own_time, saving
from dlprof.measures.steps import mean_step_ns, of_step, step_means
from dlprof.measures.syncs import syncs
from dlprof.result import Finding, Panel
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
}


def check(run: Measured) -> Finding | Clear:
    """Look at the device's idle time behind such waits, and at what the job would gain without."""
    if settings.on_cpu(run):
        raise NotMeasured("the job trains on the CPU, where reading a value waits for nothing")
    if (run.frame(step_means)["unit"] != "step").any():
        raise NotMeasured("nothing marks the steps: starting up cannot be told from training (prof.step() marks them)")
    frame = run.frame(syncs)
    if frame["idle_ns"].isna().any():
        raise NotMeasured("the trace holds no work of a device")
    frame = frame[frame["pinned"] == 0]
    late = part(run, *_HOST)
    # The trace slows the host: of its part of the steps that were not traced these waits have the same share.
    of_host = (frame.groupby("rank")["idle_ns"].sum() / frame.groupby("rank")["host_ns"].first()).fillna(0.0)
    idle = {r: ns * float(of_host.get(r, 0.0)) for r, ns in late.items()}
    step = mean_step_ns(run)
    gain = saving(run, idle)
    if gain / step < NOTABLE_SHARE:
        return Clear(f"for {percent(gain / step)} of the step the device idles behind a wait of its host")
    worst = max(idle, key=lambda r: idle[r])
    mine = frame[frame["rank"] == worst].sort_values("idle_ns", ascending=False)
    first = mine.iloc[0]
    return Finding(
        title="The script waits for its device",
        summary=f"{digits(float(mine['calls'].sum()))} times a step rank {worst} waits until its device has caught up,"
        f" most of all in {first['asked'] or 'a call of Python'}; the device then idles for {duration(idle[worst])} a"
        " step.",
        verdict=f"{percent(gain / step)} {of_step(run)} the device idles because the script waited for it.",
        noise_ns=part_noise(run, *_HOST),
        saving_ns=gain,
        advice=tuple(dict.fromkeys(_CURES[a] for a in mine.loc[mine["idle_ns"] > 0, "asked"] if a in _CURES))
        or ("find the calls that the report lists, and make them less often",),
        evidence=_evidence(mine, worst),
        ranks=tuple(sorted(r for r, ns in idle.items() if ns >= idle[worst] / 2)),
        sure="The idle time behind the waits of the traced steps, as a share of all in which the device waits for the"
        " host.",
    )


def _evidence(mine: pd.DataFrame, rank: int) -> Panel:
    rows = tuple(
        (str(asked) or "Python", str(call), digits(float(n)), duration(float(ns)), duration(float(idle)))
        for asked, call, n, ns, idle in zip(
            mine["asked"], mine["call"], mine["calls"], mine["ns"], mine["idle_ns"], strict=True
        )
    )
    columns = ("by", "waits in", "times a step", "waiting a step", "device then idle")
    return Panel("table", f"Waits of a traced step on rank {rank}", rows, columns)


RULE = Rule(
    "host_sync",
    "Waiting for the device",
    (breakdown, own_time, step_means, syncs),
    check,
    saves_from=("host", "optimizer_host"),
)
