"""What the optimizer's step takes: of the training thread on a CPU run, of the device and its idle time on a GPU."""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof import intervals as iv
from dlprof.engine import RankData, per_rank
from dlprof.errors import NotMeasured
from dlprof.measures import breakdown, device, host
from dlprof.measures.steps import light_steps, standard_error, timing

RANGES = ("Optimizer.step#", "dlprof::optimizer")


@per_rank
def optimizer_work(rank: RankData) -> pd.DataFrame:
    """Give one row, of a mean steady step: ns that the optimizer takes, noise_ns, of it idle_ns in which a device waits
    for it, and calls (of kernels; on the CPU of operators; NaN: not traced).

    What it exchanges with other ranks (Horovod, ZeRO) is none of it, as far as a trace shows that; the rest is then no
    longer than in the traced steps, since what varies is the waiting. On a GPU `ns` is the time of the kernels that the
    optimizer launched, and that idle time. Raises NotMeasured where the optimizer's time cannot be told.
    """
    t = timing(rank)
    windows = iv.merge(t.windows)
    n = max(len(t.windows), 1)
    traced = rank.has("spans")
    if traced and device.has_device(rank):
        kernels = _launched(rank)
        start, dur = kernels["start_ns"].to_numpy(), kernels["dur_ns"].to_numpy()
        inside = iv.holds(windows, start)
        idle = iv.total(breakdown.partition(rank).get("optimizer_host", iv.EMPTY)) / n
        took = float(dur[inside].sum()) / n
        edges = np.append(t.windows[:, 0], t.windows[-1, 1])
        each = iv.per_slot(iv.union(start[inside], (start + dur)[inside]), edges).astype(float)
        return _row(took + idle, standard_error(each), idle, float(inside.sum()) / n)
    if (rank.facts.get("device") or {}).get("type") not in ("cpu", None):
        raise NotMeasured("without a trace of its device nobody knows what the optimizer's kernels take")
    calls = np.nan
    within, own, most = iv.EMPTY, 1.0, np.inf
    if traced:
        thread = host.on_training_thread(rank)
        within = iv.intersect(windows, host.cover(thread, host.is_named(thread, *RANGES)))
        ops = host.outermost(thread[host.is_kind(thread, "op")])
        calls = float(iv.holds(within, ops["start_ns"].to_numpy()).sum()) / n
        exchanging = iv.intersect(within, breakdown.exposed_communication(rank))
        own -= iv.total(exchanging) / max(iv.total(within), 1)
        within = iv.subtract(within, exchanging)
        most = iv.total(within) / n if len(exchanging) else np.inf
    if t.source == "steps":
        frame = rank.once(light_steps)
        took_ns = np.maximum(frame.loc[frame["steady"], "optimizer_ns"].to_numpy(dtype=float), 0.0) * own
        took_ns *= min(1.0, most / max(float(took_ns.mean()), 1.0))
    else:
        took_ns = iv.per_slot(within, np.append(t.windows[:, 0], t.windows[-1, 1])).astype(float)
    if not took_ns.sum():
        raise NotMeasured("no optimizer was seen at work")
    return _row(float(took_ns.mean()), standard_error(took_ns), 0.0, calls)


def _row(ns: float, noise_ns: float, idle_ns: float, calls: float) -> pd.DataFrame:
    return pd.DataFrame({"ns": [ns], "noise_ns": [noise_ns], "idle_ns": [idle_ns], "calls": [calls]})


def _launched(rank: RankData) -> pd.DataFrame:
    """Give the kernels that the training thread launched in its optimizer."""
    thread = host.on_training_thread(rank)
    within = host.cover(thread, host.is_named(thread, *RANGES))
    if not len(within):
        raise NotMeasured("the trace does not tell what belongs to the optimizer")
    calls = host.is_kind(thread, "runtime")
    mine = thread["launch"].to_numpy()[calls][iv.holds(within, thread["start_ns"].to_numpy()[calls])]
    work = device.device_work(rank)
    return work[host.is_kind(work, "kernel") & np.isin(work["launch"].to_numpy(), mine[mine >= 0])]
