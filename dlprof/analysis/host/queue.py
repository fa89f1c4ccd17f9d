"""How far a device is behind its host, how much work is queued for it, and what queued work waits for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Maybe, per_rank
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.idle import Idle, first_after
from dlprof.analysis.timeline.launches import Launches, Queue
from dlprof.analysis.timeline.steps import Timing
from dlprof.analysis.timeline.traced import TracedSteps
from dlprof.analysis.timeline.what_if import WhatIf
from dlprof.errors import NotMeasured
from dlprof.units import short

# CUDA and HIP queue about so many launches; then the next launch waits for room.
FULL = 1_024

MOST_ROWS = 12
MOST_POINTS = 300

# What queued work may wait for, as far as the calls around its launch tell.
GRAPH_START = "not in the trace (it is the first node of a graph)"
GRAPH_NODE = "a node of the same graph that is no kernel (a function on the host, an event, memory)"
EVENT = "an event of another stream (cudaStreamWaitEvent before its launch)"
FUNCTION = "a function on the host (cudaLaunchHostFunc before its launch)"
MEMORY = "the host, which was getting or freeing memory of the device"
OTHER_STREAM = "work on another stream, which had just ended"
UNTOLD = "not in the trace"

_ALLOCATES = ("cudaMalloc", "cudaFree", "hipMalloc", "hipFree", "cuMem", "hipMem")


@per_rank
def device_lag(trace_window: TracedSteps, timing: Timing, launch_queue: Maybe[Queue]) -> pd.DataFrame:
    """Return one row: lag_ns, how far the device is behind the host where a steady traced step begins; queued (launches
    that wait to start, the mean over those steps) and most_queued.

    Raises NotMeasured where the trace does not link launches to device work.
    """
    if not trace_window.linked or timing.unit != "step" or np.isnan(trace_window.lag_ns[timing.chosen]).all():
        raise NotMeasured("the trace does not tell how far the device is behind its host")
    waiting = launch_queue.get()
    inside = iv.holds(iv.merge(timing.windows), waiting.at)
    begin, end = int(timing.windows[0, 0]), int(timing.windows[-1, 1])
    return pd.DataFrame(
        {
            "lag_ns": [float(np.nanmean(trace_window.lag_ns[timing.chosen]))],
            "queued": [waiting.mean(begin, end)],
            "most_queued": [int(waiting.length[inside].max()) if inside.any() else 0],
        }
    )


@per_rank
def queue_series(trace_window: TracedSteps, timing: Timing, launch_queue: Maybe[Queue]) -> pd.DataFrame:
    """Return how many launches wait to start over the steady traced steps: at_ns, queued (the mean until the next)."""
    if not trace_window.linked or timing.unit != "step":
        raise NotMeasured("the trace does not tell how much work is queued")
    edges = np.linspace(int(timing.windows[0, 0]), int(timing.windows[-1, 1]), MOST_POINTS + 1).astype(np.int64)
    waiting = launch_queue.get()
    # The queue's length times ns before each instant; between two changes it grows evenly.
    grown = np.concatenate(([0], np.cumsum(waiting.length[:-1] * np.diff(waiting.at))))
    at = np.maximum(np.searchsorted(waiting.at, edges, side="right") - 1, 0)
    total = grown[at] + waiting.length[at] * np.maximum(edges - waiting.at[at], 0)
    return pd.DataFrame({"at_ns": edges[:-1], "queued": np.diff(total) / np.maximum(np.diff(edges), 1)})


@per_rank
def queued_waits(
    timing: Timing,
    idle: Idle,
    device_work: pd.DataFrame,
    spans: pd.DataFrame,
    launches: Launches,
    what_if: Maybe[WhatIf],
) -> pd.DataFrame:
    """Return what waits in the device's queue while the device idles, in the steady traced steps, the longest first.

    Columns: ended_by (the work that ended the wait), stream, launched_by (the call), waits_for, times and ns (a step),
    queued_ns (from its launch to its start, the mean), gain_ns (how much shorter the mean steady step would be without
    the waits of all rows with the same waits_for; NaN: the trace cannot be replayed). Empty where nothing waits.
    """
    windows = iv.merge(timing.windows)
    gaps = idle.queued
    inside = iv.within(windows, gaps[:, 0], gaps[:, 1])
    gaps, inside = gaps[inside > 0], inside[inside > 0]
    row = first_after(device_work, gaps)
    gaps, inside, row = gaps[row >= 0], inside[row >= 0], row[row >= 0]
    columns = ["ended_by", "stream", "launched_by", "waits_for", "times", "ns", "queued_ns", "gain_ns"]
    if not len(row):
        return pd.DataFrame(columns=columns).astype(dict.fromkeys(columns[4:], float))
    calls, reasons = _reasons(spans, device_work, launches, gaps, row)
    n = max(len(timing.windows), 1)
    waits = pd.DataFrame(
        {
            "ended_by": [short(str(name), 120) for name in device_work["name"].array[row]],
            "stream": device_work["lane"].astype("str").to_numpy()[row],
            "launched_by": calls,
            "waits_for": reasons,
            "times": 1 / n,
            "ns": inside / n,
            "queued_ns": (device_work["start_ns"].to_numpy()[row] - launches.called[row]).astype(float),
        }
    )
    by = ["ended_by", "stream", "launched_by", "waits_for"]
    sums = waits.groupby(by, as_index=False, sort=False).agg({"times": "sum", "ns": "sum", "queued_ns": "mean"})
    gains = _gains(what_if, row, reasons)
    sums = sums.assign(gain_ns=sums["waits_for"].map(gains).astype(float))
    return sums.sort_values("ns", ascending=False, ignore_index=True).head(MOST_ROWS)[columns]


def _reasons(
    spans: pd.DataFrame, device_work: pd.DataFrame, launches: Launches, gaps: iv.Intervals, row: NDArray[np.int64]
) -> tuple[list[str], list[str]]:
    """Return for each wait the call that launched the work which ended it, and what it waited for."""
    runtime = spans[["name", "lane", "start_ns", "dur_ns", "launch"]][host.is_kind(spans, "runtime")]
    called, names = runtime["start_ns"].to_numpy(), runtime["name"].astype("str").to_numpy()
    lane, ended = runtime["lane"].cat.codes.to_numpy(), called + runtime["dur_ns"].to_numpy()
    launch_at = launches.called[row]
    at = np.searchsorted(called, launch_at)
    first = _first_nodes(device_work)
    end = device_work["start_ns"].to_numpy() + device_work["dur_ns"].to_numpy()
    order = np.argsort(end, kind="stable")
    calls, reasons = [], []
    allocating = np.array([name.startswith(_ALLOCATES) and "cpy" not in name and "set" not in name for name in names])
    for i, (gap, place) in enumerate(zip(gaps.tolist(), at.tolist(), strict=True)):
        name = names[place] if place < len(names) else ""
        calls.append(name)
        thread = np.flatnonzero(lane[max(place - 200, 0) : place] == lane[min(place, len(lane) - 1)]) + max(
            place - 200, 0
        )
        busy = slice(np.searchsorted(called, gap[0] - 1_000_000), np.searchsorted(called, gap[1]))
        allocates = bool((allocating[busy] & (ended[busy] > gap[0])).any())
        last = order[max(int(np.searchsorted(end[order], gap[0], side="right")) - 1, 0)]
        other = device_work["lane"].cat.codes.to_numpy()[last] != device_work["lane"].cat.codes.to_numpy()[row[i]]
        reasons.append(_reason(name, bool(first[row[i]]), _since_last_launch(names[thread]), allocates, bool(other)))
    return calls, reasons


def _first_nodes(work: pd.DataFrame) -> NDArray[np.bool_]:
    """Return which rows are the first of what their launch launched."""
    launch = work["launch"].to_numpy()
    first = np.zeros(len(launch), dtype=bool)
    first[np.unique(launch, return_index=True)[1]] = True
    return first


def _since_last_launch(names: Sequence[str]) -> list[str]:
    """Return the calls of a thread after the last one that launched a kernel or a copy."""
    since: list[str] = []
    for name in reversed(list(names)):
        if any(word in name for word in ("LaunchKernel", "Memcpy", "Memset", "GraphLaunch")):
            break
        since.append(name)
    return since


def _reason(call: str, first: bool, before: Sequence[str], allocates: bool, other: bool) -> str:
    if "GraphLaunch" in call:
        return GRAPH_START if first else GRAPH_NODE
    if any("LaunchHostFunc" in name or "AddCallback" in name for name in before):
        return FUNCTION
    if any("StreamWaitEvent" in name for name in before):
        return EVENT
    if allocates:
        return MEMORY
    return OTHER_STREAM if other else UNTOLD


def _gains(what_if: Maybe[WhatIf], row: NDArray[np.int64], reasons: Sequence[str]) -> dict[str, float]:
    """Replay the steps without the waits of each reason."""
    try:
        asked = what_if.get()
    except NotMeasured:
        return {}
    gains = {}
    for reason in set(reasons):
        rows = {int(r) for r, why in zip(row.tolist(), reasons, strict=True) if why == reason}
        gains[reason] = asked.gain_ns(at_once=np.flatnonzero(np.isin(asked.replay.rows, list(rows))).tolist())
    return gains
