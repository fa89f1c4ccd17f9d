"""Where the host and its device wait for each other.

The device: how far it is behind its host, how much work is queued for it, and what queued work waits for. The host: it
stops until the device has caught up at `.item()`, `.cpu()`, prints, explicit synchronising. That costs twice: the host
does nothing meanwhile, and when it goes on the device has nothing queued.
"""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Frame, Job, Maybe, across_ranks, maybe, needs, per_rank, within_rank
from dlprof.analysis.host.gaps import Segments, host_gaps, segments
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import (
    NOT_LINKED,
    Idle,
    Launches,
    Queue,
    device_work,
    first_after,
    has_device,
    idle,
    launch_queue,
    launches,
)
from dlprof.analysis.timeline.host import on_training_thread
from dlprof.analysis.timeline.replay import SYNCHRONISING
from dlprof.analysis.timeline.steps import NOT_MARKED, Timing, TracedSteps, timing, trace_window
from dlprof.analysis.timeline.what_if import WhatIf, what_if
from dlprof.errors import NotMeasured
from dlprof.units import short

# CUDA and HIP queue about so many launches; then the next launch waits until one has begun.
FULL = 1_024

MOST_QUEUED = 12
MOST_POINTS = 300

# What queued work may wait for, as far as the calls around its launch show it.
GRAPH_START = "not in the trace (it is the first node of a graph)"
GRAPH_NODE = "a node of the same graph that is no kernel (a function on the host, an event, memory)"
EVENT = "an event of another stream (cudaStreamWaitEvent before its launch)"
FUNCTION = "a function on the host (cudaLaunchHostFunc before its launch)"
MEMORY = "the host, which was getting or freeing memory of the device"
OTHER_STREAM = "work on another stream, which had just ended"
UNKNOWN = "not in the trace"

_ALLOCATES = ("cudaMalloc", "cudaFree", "hipMalloc", "hipFree", "cuMem", "hipMem")
_LAUNCHES = ("LaunchKernel", "Memcpy", "Memset", "GraphLaunch")

# What made queued work wait is looked for among so many calls before its launch, and allocations that began no longer
# before the wait.
_NEAR = 200
_LONGEST_NS = 1_000_000

_QUEUED = ["ended_by", "stream", "launched_by", "waits_for"]


@per_rank
def device_lag(
    trace_window: TracedSteps = needs(trace_window),
    timing: Timing = needs(timing),
    launch_queue: Maybe[Queue] = maybe(launch_queue),
) -> pd.DataFrame:
    """Return one row: lag_ns, how far the device is behind the host where a steady traced step begins; queued (launches
    that wait to start, the mean over those steps).

    Raises NotMeasured where the trace does not link launches to device work.
    """
    lag = trace_window.lag_ns[timing.chosen]
    if timing.unit != "step":
        raise NotMeasured(NOT_MARKED)
    if not trace_window.linked or np.isnan(lag).all():
        raise NotMeasured(NOT_LINKED)
    queue = launch_queue.get()
    mean = queue.mean(int(timing.windows[0, 0]), int(timing.windows[-1, 1]))
    return pd.DataFrame({"lag_ns": [float(np.nanmean(lag))], "queued": [mean]})


@per_rank
def queue_series(
    trace_window: TracedSteps = needs(trace_window),
    timing: Timing = needs(timing),
    launch_queue: Maybe[Queue] = maybe(launch_queue),
) -> pd.DataFrame:
    """Return how many launches wait to start over the steady traced steps: at_ns, queued (the mean until the next)."""
    if timing.unit != "step":
        raise NotMeasured(NOT_MARKED)
    if not trace_window.linked:
        raise NotMeasured(NOT_LINKED)
    edges = np.linspace(int(timing.windows[0, 0]), int(timing.windows[-1, 1]), MOST_POINTS + 1).astype(np.int64)
    queue = launch_queue.get()
    # The queue's length times ns before each instant; between two changes it grows evenly.
    grown = np.concatenate(([0], np.cumsum(queue.length[:-1] * np.diff(queue.at))))
    at = np.maximum(np.searchsorted(queue.at, edges, side="right") - 1, 0)
    total = grown[at] + queue.length[at] * np.maximum(edges - queue.at[at], 0)
    return pd.DataFrame({"at_ns": edges[:-1], "queued": np.diff(total) / np.maximum(np.diff(edges), 1)})


@per_rank
def queued_waits(
    timing: Timing = needs(timing),
    idle: Idle = needs(idle),
    device_work: Frame = needs(device_work),
    spans: Frame = needs(schema.SPANS),
    launches: Launches = needs(launches),
    what_if: Maybe[WhatIf] = maybe(what_if),
) -> pd.DataFrame:
    """Return what waits in the device's queue while the device idles, in the steady traced steps, the longest first.

    Columns: ended_by (the work that ended the wait), stream, launched_by (the call), waits_for, times and ns (a step),
    queued_ns (from its launch to its start, the mean), gain_ns (how much shorter the mean steady step would be without
    the waits of all rows with the same waits_for; NaN: the trace cannot be replayed).
    """
    inside = iv.within(iv.merge(timing.windows), idle.queued[:, 0], idle.queued[:, 1])
    row = first_after(device_work, idle.queued)
    known = (inside > 0) & (row >= 0)
    gaps, inside, row = idle.queued[known], inside[known], row[known]
    steps = max(len(timing.windows), 1)
    calls = _calls(spans, launches.called[row])
    waits = pd.DataFrame(
        {
            "ended_by": [short(str(name), 120) for name in device_work["name"].array[row]],
            "stream": host.written(device_work["lane"])[row],
            "launched_by": [names[-1] for names in calls],
            "waits_for": _reasons(spans, device_work, calls, gaps, row),
            "times": 1 / steps,
            "ns": inside / steps,
            "queued_ns": device_work["start_ns"].to_numpy()[row] - launches.called[row],
        }
    )
    sums = waits.groupby(_QUEUED, as_index=False, sort=False).agg({"times": "sum", "ns": "sum", "queued_ns": "mean"})
    gains = {}
    if whatif := what_if.or_none():
        for reason, at in waits.groupby("waits_for").indices.items():
            gains[reason] = whatif.gain_ns(at_once=np.flatnonzero(np.isin(whatif.replay.rows, row[at])).tolist())
    sums = sums.assign(gain_ns=sums["waits_for"].map(gains))
    sums = sums.astype(dict.fromkeys(_QUEUED, "str") | dict.fromkeys(("times", "ns", "queued_ns", "gain_ns"), "float"))
    return sums.sort_values("ns", ascending=False, ignore_index=True).head(MOST_QUEUED)


def _calls(spans: pd.DataFrame, launched: NDArray[np.int64]) -> list[list[str]]:
    """Return for each launch its thread's calls since the one before that launched work; the launch itself is last."""
    runtime = spans[["name", "lane", "start_ns"]][host.is_kind(spans, "runtime")]
    names, lane = host.written(runtime["name"]), runtime["lane"].cat.codes.to_numpy()
    found = []
    for at in np.searchsorted(runtime["start_ns"].to_numpy(), launched).tolist():
        near = slice(max(at - _NEAR, 0), at)
        calls = names[near][lane[near] == lane[at]].tolist()
        since = itertools.takewhile(lambda name: not any(word in name for word in _LAUNCHES), reversed(calls))
        found.append([*since, names[at]])
    return found


def _reasons(
    spans: pd.DataFrame, device_work: pd.DataFrame, calls: list[list[str]], gaps: iv.Intervals, row: NDArray[np.int64]
) -> list[str]:
    """Return what each wait was for; `calls`: those of the launch of the work, `row`, that ended it."""
    runtime = spans[["name", "start_ns", "dur_ns"]][host.is_kind(spans, "runtime")]
    runtime = runtime[host.is_named(runtime, *_ALLOCATES)]
    runtime = runtime[~np.array(["cpy" in name or "set" in name for name in host.written(runtime["name"])], dtype=bool)]
    begin = runtime["start_ns"].to_numpy()
    end = begin + runtime["dur_ns"].to_numpy()
    allocates = [
        bool(((begin >= start - _LONGEST_NS) & (begin < stop) & (end > start)).any()) for start, stop in gaps.tolist()
    ]
    first = ~device_work["launch"].duplicated().to_numpy()[row]
    done = device_work["start_ns"].to_numpy() + device_work["dur_ns"].to_numpy()
    order, lane = np.argsort(done, kind="stable"), device_work["lane"].cat.codes.to_numpy()
    last = order[np.maximum(np.searchsorted(done[order], gaps[:, 0], side="right") - 1, 0)]
    return [_reason(*each) for each in zip(calls, first, allocates, lane[last] != lane[row], strict=True)]


def _reason(calls: list[str], first: bool, allocates: bool, other: bool) -> str:
    if "GraphLaunch" in calls[-1]:
        return GRAPH_START if first else GRAPH_NODE
    if any("LaunchHostFunc" in name or "AddCallback" in name for name in calls[:-1]):
        return FUNCTION
    if any("StreamWaitEvent" in name for name in calls[:-1]):
        return EVENT
    if allocates:
        return MEMORY
    return OTHER_STREAM if other else UNKNOWN


# What reads GradScaler's flag, in the place of an operator of the script.
GRAD_SCALER = "GradScaler.step"

_COPIES = ("cudaMemcpy", "hipMemcpy")

# Operators that read a value out of a tensor; on the CPU that waits for nothing, so they are only counted.
_READS = ("aten::item", "aten::is_nonzero", "aten::_local_scalar_dense", "aten::nonzero")

MOST_SYNCS = 20

_WAIT = ["caller", "call", "copied"]
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

    Columns: caller (the outermost operator, GRAD_SCALER, or "" where Python called the runtime itself), call (the
    runtime's), copied (of a copy to the device, the host memory that is waited for: "pinned", "pageable", else ""),
    looped (1: in a loop over parameters), calls, ns (the thread's wait) and idle_ns (how long the device then had
    nothing because the host had launched nothing more), all a step; gain_ns, how much shorter the mean steady step
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
        counts = read["name"].astype("str").value_counts().head(MOST_SYNCS)
        times = dict.fromkeys(("ns", "idle_ns", "gain_ns"), np.nan)
        counted = {"caller": counts.index, "call": "", "copied": "", "looped": 0, "calls": counts.to_numpy() / steps}
        return pd.DataFrame(counted | times)
    waits = sync_waits.get()
    own = iv.holds(grad_scaler_reads(on_training_thread, ops), waits["start_ns"].to_numpy())
    loops = segments.or_none()
    waits = waits.assign(
        caller=waits["caller"].mask(own, GRAD_SCALER),
        looped=iv.holds(loops.looping if loops else iv.EMPTY, waits["start_ns"].to_numpy()).astype(int),
        calls=1.0,
        ns=(waits["end_ns"] - waits["start_ns"]).astype(float),
        idle_ns=_then_idle(idle.get(), host_gaps, waits),
    )
    kinds = waits.groupby(_KIND)[["calls", "ns", "idle_ns"]].sum().div(steps).reset_index()
    kinds = kinds.assign(gain_ns=np.nan)
    if whatif := what_if.or_none():
        # Several of the replay's waits may lie in one operator.
        begins = np.array([wait.begin for wait in whatif.replay.waits], dtype=np.int64)
        for copied, same in waits.groupby("copied"):
            around = iv.union(same["start_ns"].to_numpy(), same["end_ns"].to_numpy())
            free = np.flatnonzero(iv.holds(around, begins)).tolist()
            kinds.loc[kinds["copied"] == copied, "gain_ns"] = whatif.gain_ns(free=free) if free else 0.0
    return kinds.sort_values("ns", ascending=False, kind="stable", ignore_index=True).head(MOST_SYNCS)


@across_ranks
def linked(syncs: Frame = needs(syncs)) -> pd.DataFrame:
    """Return `syncs`; raise NotMeasured where what the waits cost is not known."""
    if len(syncs) and syncs["gain_ns"].isna().all():
        raise NotMeasured(f"{NOT_LINKED}, or holds no device work")
    return syncs


def gains_without(job: Job, waits: pd.DataFrame) -> dict[int, float]:
    """Return what each rank gains without any of some rows of `syncs` that copy from the same memory, ns a step."""
    gains = waits.groupby("rank")["gain_ns"].max().fillna(0.0)
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
    """Return each wait once, in order: caller, call, copied, start_ns, end_ns, row (of its call, in the spans).

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
            "caller": [operators[op] if op >= 0 else "" for op in within],
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
