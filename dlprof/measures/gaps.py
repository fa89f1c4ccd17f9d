"""Why a device has nothing to do between two pieces of its work, and how much of that launching cheaper would save.

The work after a gap tells: launched after the device had run dry, the host was late; launched before, and the gap is
short, it is what starting a kernel takes; else it waited for something on the device (a stream, an event).
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof import intervals as iv
from dlprof.engine import RankData, per_rank
from dlprof.measures import breakdown, device, host
from dlprof.measures.steps import timing

# A gap before work that was launched in time is the device's own way from one kernel to the next up to here: a few µs,
# tens where a trace's clock is coarse. A longer one is a dependency.
OVERHEAD_NS = 20_000

# From one operator to the next Python takes 5 to 50 µs in a model's code. Where no thread is in an operator or in a
# call of the runtime for longer than this, the script does something else.
PAUSE_NS = 100_000

# What remains between two kernels of a captured graph: NVIDIA measures 0.5 µs ("Getting Started with CUDA Graphs",
# kernels of 2.9 µs that take 3.4 µs each); twice that here.
GRAPH_GAP_NS = 1_000

# Launching an operator from Python takes a host some 10 µs: a shorter kernel cannot hide the next one's launch.
SMALL_NS = 10_000

MOST_ROWS = 10


@per_rank
def gaps(rank: RankData) -> pd.DataFrame:
    """Divide the device's idle time of a steady traced step by its cause: one row, all in ns.

    launching_ns: late, with the host in operators, the runtime, or on its way between them. python_ns: late, with the
    host in neither for longer. overhead_ns, dependency_ns: launched in time. What the host itself waited for (a
    loader, a stall) is in none of them. kept_ns: what of launching and overhead a captured graph would keep. And
    small_launching_ns, small_overhead_ns, small_kept_ns: the parts behind kernels too short to hide a launch.
    Raises NotMeasured where the trace holds no work of a device.
    """
    spans = rank.table("spans")
    windows = iv.merge(timing(rank).windows)
    busy = device.device_sets(rank).busy
    late = device.late_host(rank)
    parts = breakdown.partition(rank)
    hosts = iv.merge(parts.get("host", iv.EMPTY), parts.get("optimizer_host", iv.EMPTY))
    calls = host.cover(spans, ~host.is_on_device(rank) & host.is_kind(spans, "op", "runtime", "communication"))
    pauses = iv.subtract(windows, calls)
    python = iv.intersect(hosts, pauses[pauses[:, 1] - pauses[:, 0] > PAUSE_NS])
    launching = iv.subtract(hosts, python)
    span = np.array([[busy[0, 0], busy[-1, 1]]], dtype=np.int64)
    in_time = iv.intersect(iv.subtract(iv.subtract(span, busy), late), windows)
    short = in_time[:, 1] - in_time[:, 0] <= OVERHEAD_NS
    overhead = in_time[short]
    small_launching, small_overhead = _behind_small(rank, launching), _behind_small(rank, overhead)
    found = {
        "launching_ns": iv.total(launching),
        "python_ns": iv.total(python),
        "overhead_ns": iv.total(overhead),
        "dependency_ns": iv.total(in_time[~short]),
        "kept_ns": _kept(busy, launching, overhead),
        "small_launching_ns": iv.total(small_launching),
        "small_overhead_ns": iv.total(small_overhead),
        "small_kept_ns": _kept(busy, small_launching, small_overhead),
    }
    n = max(len(timing(rank).windows), 1)
    return pd.DataFrame({name: [ns / n] for name, ns in found.items()})


def _kept(busy: iv.Intervals, *idle: iv.Intervals) -> int:
    """Give what a graph would keep of some idle time: a short gap for each that there is, and no more than there is."""
    together = iv.merge(*idle)
    after = np.searchsorted(busy[:, 0], together[:, 0], side="right")
    number = int(np.count_nonzero(np.diff(after, prepend=-1)))
    return min(GRAPH_GAP_NS * number, iv.total(together))


def _behind_small(rank: RankData, idle: iv.Intervals) -> iv.Intervals:
    """Give the idle time that follows a kernel too short to hide a launch."""
    work = device.device_work(rank)
    end = work["start_ns"].to_numpy() + work["dur_ns"].to_numpy()
    order = np.argsort(end, kind="stable")
    at = np.searchsorted(end[order], idle[:, 0], side="right") - 1
    small = (host.is_kind(work, "kernel") & (work["dur_ns"].to_numpy() < SMALL_NS))[order]
    return idle[(at >= 0) & small[np.maximum(at, 0)]] if len(work) else iv.EMPTY


@per_rank
def small_kernels(rank: RankData) -> pd.DataFrame:
    """Count the kernels below SMALL_NS in a steady traced step by name, the most frequent first: name, count, mean_ns.

    With a column `kernels`: how many of any length there are. Raises NotMeasured without work of a device.
    """
    device.device_sets(rank)
    n = max(len(timing(rank).windows), 1)
    work = device.device_work(rank)
    start = work["start_ns"].to_numpy()
    inside = np.zeros(len(work), dtype=bool)
    for s, e in iv.merge(timing(rank).windows):
        inside[np.searchsorted(start, s) : np.searchsorted(start, e)] = True
    inside &= host.is_kind(work, "kernel")
    dur, name = work["dur_ns"].to_numpy(), work["name"].cat
    small = inside & (dur < SMALL_NS)
    code, names = name.codes.to_numpy()[small], name.categories
    count = np.bincount(code, minlength=len(names))
    took = np.bincount(code, weights=dur[small], minlength=len(names))
    most = np.argsort(-count, kind="stable")[:MOST_ROWS]
    most = most[count[most] > 0]
    return pd.DataFrame(
        {
            "name": names[most].astype("str"),
            "count": count[most] / n,
            "mean_ns": took[most] / count[most],
            "small": np.count_nonzero(small) / n,
            "kernels": np.count_nonzero(inside) / n,
        }
    )
