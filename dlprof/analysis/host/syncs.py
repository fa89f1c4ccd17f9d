"""Where the training thread stops until the device has caught up: `.item()`, `.cpu()`, prints, explicit synchronising.

Such a wait costs twice: the host does nothing meanwhile, and when it goes on the device has nothing queued.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Frame, Job, Maybe, across_ranks, maybe, needs, per_rank, within_rank
from dlprof.analysis.host.gaps import host_gaps
from dlprof.analysis.host.segments import Segments, segments
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import NOT_LINKED, Idle, device_work, has_device, idle
from dlprof.analysis.timeline.host import on_training_thread
from dlprof.analysis.timeline.replay import SYNCHRONISING
from dlprof.analysis.timeline.steps import Timing, timing
from dlprof.analysis.timeline.what_if import WhatIf, what_if
from dlprof.errors import NotMeasured

# What reads GradScaler's flag, in the place of an operator of the script.
GRAD_SCALER = "GradScaler.step"

_COPIES = ("cudaMemcpy", "hipMemcpy")

# Operators that read a value out of a tensor; on the CPU that waits for nothing, so they are only counted.
_READS = ("aten::item", "aten::is_nonzero", "aten::_local_scalar_dense", "aten::nonzero")

MOST_ROWS = 20

_WAIT = ["asked", "call", "copied"]
_KIND = [*_WAIT, "looped"]


@within_rank
def sync_waits(
    on_training_thread: Frame = needs(on_training_thread),
    device_work: Frame = needs(device_work),
    timing: Timing = needs(timing),
) -> pd.DataFrame:
    """Return each wait of the training thread for the device in the steady traced steps, as `_waits` does."""
    waits = _waits(on_training_thread, _operators(on_training_thread), device_work)
    return waits[iv.holds(iv.merge(timing.host_windows), waits["start_ns"].to_numpy())]


@per_rank
def syncs(
    on_training_thread: Frame = needs(on_training_thread),
    timing: Timing = needs(timing),
    has_device: bool = needs(has_device),
    sync_waits: Maybe[Frame] = maybe(sync_waits),
    idle: Maybe[Idle] = maybe(idle),
    host_gaps: Maybe[iv.Intervals] = maybe(host_gaps),
    what_if: Maybe[WhatIf] = maybe(what_if),
    segments: Maybe[Segments] = maybe(segments),
) -> pd.DataFrame:
    """Return what made the training thread wait in the steady traced steps, the longest first.

    Columns: asked (the outermost operator, GRAD_SCALER, or "" where Python called the runtime itself), call (the
    runtime's), copied (of a copy to the device, the host memory that is waited for: "pinned", "pageable", else ""),
    looped (1: in a loop over parameters), calls, ns (the thread's wait) and idle_ns (how long the device then had
    nothing because the host had launched nothing more), all a step; together_ns, how much shorter the mean steady step
    would be without all waits of the same `copied` (NaN: the trace does not link launches to kernels). On the CPU,
    where values are only read, all times are NaN. Raises NotMeasured without a trace.
    """
    steps = max(len(timing.windows), 1)
    if not len(on_training_thread):
        raise NotMeasured("no thread of the host was traced")
    ops = _operators(on_training_thread)
    if not has_device:
        read = ops[host.is_named(ops, *_READS)]
        read = read[iv.holds(iv.merge(timing.host_windows), read["start_ns"].to_numpy())]
        counts = read["name"].astype("str").value_counts().head(MOST_ROWS)
        times = dict.fromkeys(("ns", "idle_ns", "together_ns"), np.nan)
        counted = {"asked": counts.index, "call": "", "copied": "", "looped": 0, "calls": counts.to_numpy() / steps}
        return pd.DataFrame(counted | times)
    waits = sync_waits.get()
    own = iv.holds(grad_scaler_reads(on_training_thread, ops), waits["start_ns"].to_numpy())
    loops = segments.or_none()
    waits = waits.assign(
        asked=waits["asked"].mask(own, GRAD_SCALER),
        looped=iv.holds(loops.looping if loops else iv.EMPTY, waits["start_ns"].to_numpy()).astype(int),
        calls=1.0,
        ns=(waits["end_ns"] - waits["start_ns"]).astype(float),
        idle_ns=_then_idle(idle.get(), host_gaps, waits),
    )
    kinds = waits.groupby(_KIND)[["calls", "ns", "idle_ns"]].sum().div(steps).reset_index()
    kinds = kinds.assign(together_ns=np.nan)
    if whatif := what_if.or_none():
        # Several of the replay's waits may lie in one operator.
        begins = np.array([wait.begin for wait in whatif.replay.waits], dtype=np.int64)
        for copied, same in waits.groupby("copied"):
            around = iv.union(same["start_ns"].to_numpy(), same["end_ns"].to_numpy())
            free = np.flatnonzero(iv.holds(around, begins)).tolist()
            kinds.loc[kinds["copied"] == copied, "together_ns"] = whatif.gain_ns(free=free) if free else 0.0
    return kinds.sort_values("ns", ascending=False, kind="stable", ignore_index=True).head(MOST_ROWS)


@across_ranks
def linked(syncs: Frame = needs(syncs)) -> pd.DataFrame:
    """Return `syncs`; raise NotMeasured where what the waits cost is not known."""
    if len(syncs) and syncs["together_ns"].isna().all():
        raise NotMeasured(f"{NOT_LINKED}, or holds no device work")
    return syncs


def together(job: Job, waits: pd.DataFrame) -> dict[int, float]:
    """Return what each rank gains without any of some rows of `syncs` that copy from the same memory, ns a step."""
    gains = waits.groupby("rank")["together_ns"].max().fillna(0.0)
    return {rank: float(gains.get(rank, 0.0)) for rank in job.ranks}


def copying_waits(on_training_thread: pd.DataFrame, device_work: pd.DataFrame, memory: str) -> iv.Intervals:
    """Return when the training thread waits in an operator that copies from such host memory to the device."""
    waits = _waits(on_training_thread, _operators(on_training_thread), device_work)
    mine = waits[waits["copied"] == memory]
    return iv.union(mine["start_ns"].to_numpy(), mine["end_ns"].to_numpy())


def grad_scaler_reads(thread: pd.DataFrame, ops: pd.DataFrame) -> iv.Intervals:
    """Return when GradScaler itself reads a value: in the last operator before an optimizer's step.

    `thread`: the spans of the training thread, `ops`: its outermost operators. For an optimizer that does not take the
    scale itself `GradScaler.step` reads found_inf back (`_maybe_opt_step` in torch/amp/grad_scaler.py: an `.item()` a
    device), so no line of the script can be blamed. One that is fused (`_step_supports_amp_scaling`) gets it on the
    device; the operators that prepare it then stand between any reading of the script and the optimizer's step.
    """
    start = ops["start_ns"].to_numpy()
    # `unscale_` or `step` look for infinities with this.
    checked = start[host.is_named(ops, "aten::_amp_")]
    steps = np.sort(thread["start_ns"].to_numpy()[host.is_named(thread, "Optimizer.step#")])
    # Gradients were checked since the step before: an optimizer of a GAN's other half may go without.
    checks = np.searchsorted(checked, steps)
    last = np.searchsorted(start, steps, side="left") - 1
    last = last[(np.diff(checks, prepend=0) > 0) & (last >= 0)]
    last = last[host.is_named(ops, "aten::item")[last]]
    return iv.union(start[last], start[last] + ops["dur_ns"].to_numpy()[last])


def _operators(thread: pd.DataFrame) -> pd.DataFrame:
    # Three columns, not the frame: choosing rows of all would cost more than all that follows.
    return host.outermost(thread[["name", "start_ns", "dur_ns"]][host.is_kind(thread, "op")])


def _waits(thread: pd.DataFrame, ops: pd.DataFrame, device_work: pd.DataFrame) -> pd.DataFrame:
    """Return each wait once, in order: asked, call, copied, start_ns, end_ns, row (of its call, in the spans).

    An operator that copies and synchronises waits once; its longest call names the wait.
    """
    called = thread[["name", "start_ns", "dur_ns", "launch"]][host.is_kind(thread, "runtime")]
    start, launch = called["start_ns"].to_numpy(), called["launch"].to_numpy()

    def copies(direction: str, memory: str) -> NDArray[np.bool_]:
        made = host.is_one_of(device_work["copy"], direction) & host.is_one_of(device_work["memory"], memory)
        return (launch >= 0) & host.is_among(launch, device_work["launch"].to_numpy()[made])

    around = _around(ops["start_ns"].to_numpy(), ops["dur_ns"].to_numpy(), start)
    copied = np.full(len(called), "", dtype=object)
    for memory in ("pinned", "pageable"):
        copied[np.isin(around, around[copies("HtoD", memory)]) & (around >= 0)] = memory
    # A copy to ordinary memory is done when the call returns.
    home = host.is_named(called, *_COPIES) & copies("DtoH", "pageable")
    waits = np.flatnonzero(host.is_named(called, *SYNCHRONISING) | home)
    waits = waits[np.argsort(-called["dur_ns"].to_numpy()[waits], kind="stable")]
    within = around[waits]
    operators = host.written(ops["name"])
    frame = pd.DataFrame(
        {
            "asked": [operators[op] if op >= 0 else "" for op in within],
            "call": host.written(called["name"])[waits],
            "copied": copied[waits],
            "row": called.index.to_numpy()[waits],
            "start_ns": start[waits],
            "end_ns": start[waits] + called["dur_ns"].to_numpy()[waits],
        }
    ).astype(dict.fromkeys(_WAIT, "str"))
    by = frame.groupby(np.where(within >= 0, within, -1 - waits))
    once = by.agg({**dict.fromkeys([*_WAIT, "row"], "first"), "start_ns": "min", "end_ns": "max"})
    return once.sort_values("start_ns", kind="stable", ignore_index=True)


def _around(start: NDArray[np.int64], dur: NDArray[np.int64], at: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return in which of some disjoint spans, in order, each instant lies; −1: in none."""
    place = np.searchsorted(start, at, side="right") - 1
    return np.where(at < (start + dur)[place], place, -1) if len(start) else place


def _then_idle(idle: Idle, host_gaps: Maybe[iv.Intervals], waits: pd.DataFrame) -> NDArray[np.int64]:
    """Return for each wait how long the device then had nothing, because the host had not launched what came next.

    That is the rest of the gap that is open when the call returns, if the device ran dry while the host waited.
    """
    gaps, end = idle.late, waits["end_ns"].to_numpy()
    if not len(gaps) or not len(waits):
        return np.zeros(len(waits), dtype=np.int64)
    at = np.searchsorted(gaps[:, 0], end, side="right") - 1
    gap = gaps[np.maximum(at, 0)]
    open_then = (at >= 0) & (end <= gap[:, 1]) & (waits["start_ns"].to_numpy() <= gap[:, 0])
    # Several calls may end in one gap: the last of them has it.
    last = np.append(at[1:] != at[:-1], True)
    return np.where(open_then & last, iv.within(host_gaps.get(), gap[:, 0], gap[:, 1]), 0)
