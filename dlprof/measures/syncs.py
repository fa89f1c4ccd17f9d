"""Where the training thread stops until the device has caught up: `.item()`, `.cpu()`, prints, explicit synchronising.

Such a wait costs twice: the host does nothing meanwhile, and when it goes on the device has nothing queued. What the
script called is the outermost operator around the runtime's call, "" where Python called the runtime itself.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof import intervals as iv
from dlprof.engine import RankData, per_rank
from dlprof.errors import NotMeasured
from dlprof.measures import breakdown, device, host
from dlprof.measures.steps import timing

# Calls that return when the device has done what was queued, in CUDA's and HIP's words.
_BLOCKING = tuple(
    f"{runtime}{call}Synchronize" for runtime in ("cuda", "hip", "cu") for call in ("Stream", "Device", "Event", "Ctx")
)
_COPIES = ("cudaMemcpy", "hipMemcpy")

# Operators that read a value out of a tensor; on the CPU that waits for nothing, so they are only counted.
_READS = ("aten::item", "aten::is_nonzero", "aten::_local_scalar_dense", "aten::nonzero")

MOST_ROWS = 20


@per_rank
def syncs(rank: RankData) -> pd.DataFrame:
    """Give what made the training thread wait in the steady traced steps: asked, call, pinned, and a step its calls,
    ns, idle_ns, host_ns.

    `asked` is the outermost operator, `call` the runtime's; `pinned` is 1 where the wait is for a copy to the device
    from pinned memory, which need not be waited for; `ns` is the thread's wait; `idle_ns` how long the device
    then had nothing because the host had launched nothing more; `host_ns` all that it waits for the host. NaN on the
    CPU, where values are only read.
    Raises NotMeasured without a trace.
    """
    thread = host.on_training_thread(rank)
    windows = iv.merge(timing(rank).windows)
    n = max(len(timing(rank).windows), 1)
    if not len(thread):
        raise NotMeasured("no thread of the host was traced")
    # Three columns, not the frame: choosing rows of all would cost more than all that follows.
    ops = host.outermost(thread[["name", "start_ns", "dur_ns"]][host.is_kind(thread, "op")])
    if not device.has_device(rank):
        read = ops[host.is_named(ops, *_READS)]
        read = read[_inside(windows, read["start_ns"].to_numpy())]
        counts = read["name"].astype("str").value_counts().head(MOST_ROWS)
        return pd.DataFrame(
            {
                "asked": counts.index,
                "call": "",
                "pinned": 0,
                "calls": counts.to_numpy() / n,
                "ns": np.nan,
                "idle_ns": np.nan,
                "host_ns": np.nan,
            }
        )
    waits = _waits(rank, thread, ops)
    waits = waits[_inside(windows, waits["start_ns"].to_numpy())]
    gaps = device.late_host(rank)
    # The gap that is open when the call returns, if the device ran dry while the host waited and not before.
    begin, end = waits["start_ns"].to_numpy(), waits["end_ns"].to_numpy()
    at = np.searchsorted(gaps[:, 0], end, side="right") - 1
    gap = gaps[np.maximum(at, 0)] if len(gaps) else np.empty((len(at), 2), dtype=np.int64)
    open_then = (at >= 0) & (end <= gap[:, 1]) & (begin <= gap[:, 0])
    parts = breakdown.partition(rank)
    hosts = iv.merge(parts.get("host", iv.EMPTY), parts.get("optimizer_host", iv.EMPTY))
    own = iv.within(hosts, gaps[:, 0], gaps[:, 1]) if len(gaps) else np.empty(0)
    # Several calls may end in one gap: the last of them has it.
    last = np.append(at[1:] != at[:-1], True)[: len(at)]
    idle = np.where(open_then & last, own[np.maximum(at, 0)] if len(gaps) else 0, 0)
    # By hand: of a few rows pandas' groupby takes longer than all else here.
    kinds = list(zip(waits["asked"], waits["call"], waits["pinned"], strict=True))
    place = {kind: number for number, kind in enumerate(sorted(set(kinds)))}
    of = np.array([place[kind] for kind in kinds], dtype=np.int64)
    sums = {
        "calls": np.bincount(of, minlength=len(place)) / n,
        "ns": np.bincount(of, end - begin, len(place)) / n,
        "idle_ns": np.bincount(of, idle, len(place)) / n,
    }
    most = np.argsort(-sums["ns"], kind="stable")[:MOST_ROWS]
    named = [list(place)[i] for i in most]
    return pd.DataFrame(
        {
            "asked": pd.Series([asked for asked, _, _ in named], dtype="str"),
            "call": pd.Series([call for _, call, _ in named], dtype="str"),
            "pinned": np.array([pinned for _, _, pinned in named], dtype=np.int64),
            **{name: ns[most] for name, ns in sums.items()},
            "host_ns": iv.total(hosts) / n,
        }
    )


def _inside(windows: iv.Intervals, start: np.ndarray) -> np.ndarray:
    at = np.searchsorted(windows[:, 0], start, side="right") - 1
    inside: np.ndarray = (at >= 0) & (start < windows[np.maximum(at, 0), 1]) if len(windows) else at >= 0
    return inside


def _waits(rank: RankData, thread: pd.DataFrame, ops: pd.DataFrame) -> pd.DataFrame:
    """Give each wait once: asked, call, start_ns, end_ns; an operator that copies and then synchronises waits once."""
    called = thread[["name", "start_ns", "dur_ns", "launch"]][host.is_kind(thread, "runtime")]
    copies = device.device_work(rank)
    # A copy to ordinary memory is done when the call returns.
    home = host.is_one_of(copies["copy"], "DtoH") & host.is_one_of(copies["memory"], "pageable")
    launch = called["launch"].to_numpy()
    blocking = host.is_named(called, *_COPIES) & np.isin(launch, copies["launch"].to_numpy()[home]) & (launch >= 0)
    calls = called[host.is_named(called, *_BLOCKING) | blocking]
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
    # The operators that copy from pinned memory: by the calls that launched those copies.
    free = host.is_one_of(copies["copy"], "HtoD") & host.is_one_of(copies["memory"], "pinned")
    copied = called["start_ns"].to_numpy()[np.isin(launch, copies["launch"].to_numpy()[free]) & (launch >= 0)]
    pinned = np.isin(at, np.searchsorted(begin, copied, side="right") - 1) & within
    # The longest call names the wait.
    longest = np.argsort(start - end, kind="stable")
    _, first, of = np.unique(one[longest], return_index=True, return_inverse=True)
    first, count = longest[first], len(first)
    begins, ends, from_pinned = np.full(count, np.iinfo(np.int64).max), np.zeros(count, np.int64), np.zeros(count, int)
    np.minimum.at(begins, of, start[longest])
    np.maximum.at(ends, of, end[longest])
    np.maximum.at(from_pinned, of, pinned[longest].astype(int))
    order = np.argsort(begins, kind="stable")
    return pd.DataFrame(
        {
            "asked": asked[first][order],
            "call": calls["name"].astype("str").to_numpy()[first][order],
            "pinned": from_pinned[order],
            "start_ns": begins[order],
            "end_ns": ends[order],
        }
    )
