"""How far a device is behind its host, how much work is queued for it, and what queued work waits for."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Frame, Maybe, maybe, needs, per_rank
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import (
    NOT_LINKED,
    Idle,
    Launches,
    Queue,
    device_work,
    first_after,
    idle,
    launch_queue,
    launches,
)
from dlprof.analysis.timeline.steps import NOT_MARKED, Timing, TracedSteps, timing, trace_window
from dlprof.analysis.timeline.what_if import WhatIf, what_if
from dlprof.errors import NotMeasured
from dlprof.units import short

# CUDA and HIP queue about so many launches; then the next launch waits until one has begun.
FULL = 1_024

MOST_ROWS = 12
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

_WAIT = ["ended_by", "stream", "launched_by", "waits_for"]


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
    sums = waits.groupby(_WAIT, as_index=False, sort=False).agg({"times": "sum", "ns": "sum", "queued_ns": "mean"})
    gains = {}
    if whatif := what_if.or_none():
        for reason, at in waits.groupby("waits_for").indices.items():
            gains[reason] = whatif.gain_ns(at_once=np.flatnonzero(np.isin(whatif.replay.rows, row[at])).tolist())
    sums = sums.assign(gain_ns=sums["waits_for"].map(gains))
    sums = sums.astype(dict.fromkeys(_WAIT, "str") | dict.fromkeys(("times", "ns", "queued_ns", "gain_ns"), "float"))
    return sums.sort_values("ns", ascending=False, ignore_index=True).head(MOST_ROWS)


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
