"""Where the training thread stops until the device has caught up: `.item()`, `.cpu()`, prints, explicit synchronising.

Such a wait costs twice: the host does nothing meanwhile, and when it goes on the device has nothing queued. What the
script called is the outermost operator around the runtime's call, "" where Python called the runtime itself.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Job, Maybe, across_ranks, per_rank
from dlprof.analysis.host import grad_scaler
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.idle import Idle
from dlprof.analysis.timeline.launched_work import SYNCHRONISING
from dlprof.analysis.timeline.steps import Timing
from dlprof.analysis.timeline.what_if import WhatIf
from dlprof.errors import NotMeasured

_COPIES = ("cudaMemcpy", "hipMemcpy")

# Operators that read a value out of a tensor; on the CPU that waits for nothing, so they are only counted.
_READS = ("aten::item", "aten::is_nonzero", "aten::_local_scalar_dense", "aten::nonzero")

MOST_ROWS = 20
MOST_REPLAYED = 6


@per_rank
def syncs(
    on_training_thread: pd.DataFrame,
    timing: Maybe[Timing],
    has_device: bool,
    device_work: pd.DataFrame,
    idle: Maybe[Idle],
    partition: Maybe[dict[str, iv.Intervals]],
    what_if: Maybe[WhatIf],
) -> pd.DataFrame:
    """Return what made the training thread wait in the steady traced steps, the longest first.

    Columns: asked (the outermost operator, or grad_scaler.READS where GradScaler asked), call (the runtime's), copied
    (the host memory that is waited for, of a copy to the device: "pinned", "pageable", else ""), calls, ns (the
    thread's wait) and idle_ns (how long the device then had nothing because the host had launched nothing more), all a
    step; gain_ns, how much shorter the mean steady step would be if none of these waits were waited for, and
    together_ns, the same for all waits of the same `copied` (NaN: the trace does not link launches to kernels). On the
    CPU, where values are only read, all times are NaN. Raises NotMeasured without a trace.
    """
    windows = iv.merge(timing.get().host_windows)
    n = max(len(timing.get().windows), 1)
    if not len(on_training_thread):
        raise NotMeasured("no thread of the host was traced")
    # Three columns, not the frame: choosing rows of all would cost more than all that follows.
    ops = host.outermost(on_training_thread[["name", "start_ns", "dur_ns"]][host.is_kind(on_training_thread, "op")])
    if not has_device:
        read = ops[host.is_named(ops, *_READS)]
        read = read[_inside(windows, read["start_ns"].to_numpy())]
        counts = read["name"].astype("str").value_counts().head(MOST_ROWS)
        times = dict.fromkeys(("ns", "idle_ns", "gain_ns", "together_ns"), np.nan)
        return pd.DataFrame({"asked": counts.index, "call": "", "copied": "", "calls": counts.to_numpy() / n, **times})
    waits = _waits(device_work, on_training_thread, ops)
    waits = waits[_inside(windows, waits["start_ns"].to_numpy())]
    own = _inside(grad_scaler.reads(on_training_thread, ops), waits["start_ns"].to_numpy())
    waits = waits.assign(asked=waits["asked"].mask(own, grad_scaler.READS))
    begin, end = waits["start_ns"].to_numpy(), waits["end_ns"].to_numpy()
    idle_ns = _then_idle(idle.get(), partition, begin, end)
    # By hand: of a few rows pandas' groupby takes longer than all else here.
    kinds = list(zip(waits["asked"], waits["call"], waits["copied"], strict=True))
    place = {kind: number for number, kind in enumerate(sorted(set(kinds)))}
    of = np.array([place[kind] for kind in kinds], dtype=np.int64)
    sums = {
        "calls": np.bincount(of, minlength=len(place)) / n,
        "ns": np.bincount(of, end - begin, len(place)) / n,
        "idle_ns": np.bincount(of, idle_ns, len(place)) / n,
    }
    gain, together = _gains(what_if, idle, timing, list(place), of, begin, end, sums["idle_ns"])
    most = np.argsort(-sums["ns"], kind="stable")[:MOST_ROWS]
    named = [list(place)[i] for i in most]
    return pd.DataFrame(
        {
            "asked": pd.Series([asked for asked, _, _ in named], dtype="str"),
            "call": pd.Series([call for _, call, _ in named], dtype="str"),
            "copied": pd.Series([copied for _, _, copied in named], dtype="str"),
            **{name: ns[most] for name, ns in sums.items()},
            "gain_ns": gain[most],
            "together_ns": together[most],
        }
    )


@across_ranks
def linked(syncs: pd.DataFrame) -> pd.DataFrame:
    """Return `syncs`; raise NotMeasured where what the waits cost is not known."""
    if len(syncs) and syncs["together_ns"].isna().all():
        raise NotMeasured("the trace does not link launches to kernels, or holds no work of a device")
    return syncs


def together(job: Job, waits: pd.DataFrame) -> dict[int, float]:
    """Return what each rank gains without any of some rows of `syncs` that copy from the same memory, ns a step."""
    gains = waits.groupby("rank")["together_ns"].max().fillna(0.0)
    return {rank: float(gains.get(rank, 0.0)) for rank in job.ranks}


def copying_waits(on_training_thread: pd.DataFrame, device_work: pd.DataFrame, memory: str) -> iv.Intervals:
    """Return when the training thread waits in an operator that copies from such host memory to the device."""
    ops = host.outermost(on_training_thread[["name", "start_ns", "dur_ns"]][host.is_kind(on_training_thread, "op")])
    waits = _waits(device_work, on_training_thread, ops)
    mine = waits[(waits["copied"] == memory).to_numpy()]
    return iv.union(mine["start_ns"].to_numpy(), mine["end_ns"].to_numpy())


def _then_idle(
    idle: Idle, partition: Maybe[dict[str, iv.Intervals]], begin: NDArray[np.int64], end: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return for each wait how long the device then had nothing, because the host had not launched what came next.

    That is the rest of the gap that is open when the call returns, if the device ran dry while the host waited.
    """
    gaps = idle.late
    if not len(gaps) or not len(begin):
        return np.zeros(len(begin), dtype=np.int64)
    parts = partition.get()
    hosts = iv.merge(parts.get("host", iv.EMPTY), parts.get("optimizer_host", iv.EMPTY))
    at = np.searchsorted(gaps[:, 0], end, side="right") - 1
    gap = gaps[np.maximum(at, 0)]
    open_then = (at >= 0) & (end <= gap[:, 1]) & (begin <= gap[:, 0])
    own = iv.within(hosts, gaps[:, 0], gaps[:, 1])
    # Several calls may end in one gap: the last of them has it.
    last = np.append(at[1:] != at[:-1], True)
    return np.where(open_then & last, own[np.maximum(at, 0)], 0)


def _gains(
    what_if: Maybe[WhatIf],
    idle: Maybe[Idle],
    timing: Maybe[Timing],
    kinds: list[tuple[str, str, str]],
    of: NDArray[np.int64],
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
    idle_ns: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Replay the steps without the waits of each kind, and without those of all kinds that copy from the same memory.

    A wait behind which the device never ran dry gains nothing, and is not replayed.
    """
    try:
        asked = what_if.get()
    except NotMeasured:
        return np.full(len(kinds), np.nan), np.full(len(kinds), np.nan)
    late = iv.intersect(idle.get().late, iv.merge(timing.get().windows))
    most = iv.total(late) / max(len(timing.get().windows), 1)
    # Several of the replay's waits may lie in one operator.
    starts = np.array([wait.begin for wait in asked.replay.waits], dtype=np.int64)
    within = np.searchsorted(begin, starts, side="right") - 1
    inside = (within >= 0) & (starts < end[np.maximum(within, 0)]) if len(begin) else np.zeros(len(starts), dtype=bool)
    kind_of = np.where(inside, of[np.maximum(within, 0)], -1) if len(begin) else np.full(len(starts), -1)

    def without(chosen: list[int]) -> float:
        free = np.flatnonzero(np.isin(kind_of, chosen))
        return min(asked.gain_ns(free=free.tolist()), most) if len(free) else 0.0

    gain, together = np.zeros(len(kinds)), np.zeros(len(kinds))
    for copied in {kind[2] for kind in kinds}:
        mine = [i for i, kind in enumerate(kinds) if kind[2] == copied and idle_ns[i] > 0]
        together[[i for i, kind in enumerate(kinds) if kind[2] == copied]] = without(mine) if mine else 0.0
        for i in sorted(mine, key=lambda i: -idle_ns[i])[:MOST_REPLAYED]:
            gain[i] = together[i] if len(mine) == 1 else without([i])
    return gain, together


def _inside(windows: iv.Intervals, start: np.ndarray) -> np.ndarray:
    at = np.searchsorted(windows[:, 0], start, side="right") - 1
    inside: np.ndarray = (at >= 0) & (start < windows[np.maximum(at, 0), 1]) if len(windows) else at >= 0
    return inside


def _waits(device_work: pd.DataFrame, thread: pd.DataFrame, ops: pd.DataFrame) -> pd.DataFrame:
    """Return each wait once: asked, call, start_ns, end_ns; an operator that copies and synchronises waits once."""
    called = thread[["name", "start_ns", "dur_ns", "launch"]][host.is_kind(thread, "runtime")]
    # A copy to ordinary memory is done when the call returns.
    home = host.is_one_of(device_work["copy"], "DtoH") & host.is_one_of(device_work["memory"], "pageable")
    launch = called["launch"].to_numpy()
    blocking = host.is_named(called, *_COPIES) & np.isin(launch, device_work["launch"].to_numpy()[home]) & (launch >= 0)
    calls = called[host.is_named(called, *SYNCHRONISING) | blocking]
    start = calls["start_ns"].to_numpy()
    end = start + calls["dur_ns"].to_numpy()
    begin = ops["start_ns"].to_numpy()
    at = np.searchsorted(begin, start, side="right") - 1
    within = (at >= 0) & (start < (begin + ops["dur_ns"].to_numpy())[np.maximum(at, 0)]) if len(ops) else at >= 0
    name = ops["name"].cat
    asked = np.where(
        within, name.categories.to_numpy()[name.codes.to_numpy()[np.maximum(at, 0)]] if len(ops) else "", ""
    )
    one = np.where(within, at, -1 - np.arange(len(calls)))
    # The operators that copy to the device: by the calls that launched those copies.
    copied = np.full(len(calls), "", dtype=object)
    for memory in ("pinned", "pageable"):
        theirs = host.is_one_of(device_work["copy"], "HtoD") & host.is_one_of(device_work["memory"], memory)
        asked_at = called["start_ns"].to_numpy()[
            np.isin(launch, device_work["launch"].to_numpy()[theirs]) & (launch >= 0)
        ]
        copied[np.isin(at, np.searchsorted(begin, asked_at, side="right") - 1) & within] = memory
    # The longest call names the wait.
    longest = np.argsort(start - end, kind="stable")
    _, first, of = np.unique(one[longest], return_index=True, return_inverse=True)
    first, count = longest[first], len(first)
    begins, ends = np.full(count, np.iinfo(np.int64).max), np.zeros(count, np.int64)
    np.minimum.at(begins, of, start[longest])
    np.maximum.at(ends, of, end[longest])
    order = np.argsort(begins, kind="stable")
    return pd.DataFrame(
        {
            "asked": asked[first][order],
            "call": calls["name"].astype("str").to_numpy()[first][order],
            "copied": copied[first][order],
            "start_ns": begins[order],
            "end_ns": ends[order],
        }
    )
