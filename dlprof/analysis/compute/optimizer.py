"""What the optimizer's step takes: of the training thread on a CPU run, of the device and its idle time on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Maybe, RankFacts, per_rank, within_rank
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.steady import standard_error
from dlprof.analysis.timeline.steps import Timing
from dlprof.analysis.timeline.what_if import WhatIf
from dlprof.errors import NotMeasured

RANGES = ("Optimizer.step#", "dlprof::optimizer")

# What a fused step takes of an unfused one's time, on a CPU and on a GPU. On a CPU as measured with torch 2.13 on one
# core, over 50 to 200 small parameters and over 8 of a million values: 0.15 to 0.27 of a loop for Adam (0.27 to 0.30 of
# foreach), 0.15 to 0.50 for SGD with momentum. On a GPU by what is read and written: a fused Adam touches 7 values a
# parameter value and the terms one by one 20, SGD 5 and 11; its launches are taken to be fewer by the same share.
FUSED_LEFT = {
    "Adam": (0.25, 7 / 20),
    "AdamW": (0.25, 7 / 20),
    "SGD": (0.30, 5 / 11),
}


@per_rank
def optimizer_work(
    timing: Timing,
    spans: Maybe[pd.DataFrame],
    has_device: bool,
    launched_by_optimizer: Maybe[NDArray[np.bool_]],
    launched_within: Maybe[NDArray[np.int64]],
    device_work: Maybe[pd.DataFrame],
    partition: Maybe[dict[str, iv.Intervals]],
    what_if: Maybe[WhatIf],
    on_training_thread: Maybe[pd.DataFrame],
    exposed_communication: Maybe[iv.Intervals],
    light_steps: Maybe[pd.DataFrame],
    rank: RankFacts,
) -> pd.DataFrame:
    """Return one row, of a mean steady step: ns that optimizer takes, noise_ns, of it idle_ns in which a device waits
    for it, calls (of kernels; on the CPU of operators; NaN: not traced), and fused_gain_ns (how much shorter the
    device's step would be with FUSED_LEFT of it; NaN: no device, or nobody knows).

    What it exchanges with other ranks (Horovod, ZeRO) is none of it, as far as a trace shows that; the rest is then no
    longer than in the traced steps, since what varies is the waiting. On a GPU `ns` is the time of the kernels that the
    optimizer launched, and that idle time. Raises NotMeasured where the optimizer's time cannot be told.
    """
    windows = iv.merge(timing.windows)
    n = max(len(timing.windows), 1)
    traced = bool(spans)
    if traced and has_device:
        chosen = launched_by_optimizer.get()
        step, dur = launched_within.get()[chosen], device_work.get()["dur_ns"].to_numpy(dtype=float)[chosen]
        idle = iv.total(partition.get().get("optimizer_host", iv.EMPTY)) / n
        each = np.bincount(step, dur, n).astype(float)
        gain = _fused_gain(what_if, on_training_thread, rank, chosen)
        return _row(float(each.mean()) + idle, standard_error(each), idle, len(step) / n, gain)
    if (rank.facts.get("device") or {}).get("type") not in ("cpu", None):
        raise NotMeasured("without a trace of its device nobody knows what the optimizer's kernels take")
    calls = np.nan
    within, own, most = iv.EMPTY, 1.0, np.inf
    if traced:
        thread = on_training_thread.get()
        within = iv.intersect(windows, host.cover(thread, host.is_named(thread, *RANGES)))
        ops = host.outermost(thread[host.is_kind(thread, "op")])
        calls = float(iv.holds(within, ops["start_ns"].to_numpy()).sum()) / n
        exchanging = iv.intersect(within, exposed_communication.get())
        own -= iv.total(exchanging) / max(iv.total(within), 1)
        within = iv.subtract(within, exchanging)
        most = iv.total(within) / n if len(exchanging) else np.inf
    if timing.source == "steps":
        frame = light_steps.get()
        took_ns = np.maximum(frame.loc[frame["steady"], "optimizer_ns"].to_numpy(dtype=float), 0.0) * own
        took_ns *= min(1.0, most / max(float(took_ns.mean()), 1.0))
    else:
        took_ns = iv.per_slot(within, np.append(timing.windows[:, 0], timing.windows[-1, 1])).astype(float)
    if not took_ns.sum():
        raise NotMeasured("no optimizer was seen at work")
    return _row(float(took_ns.mean()), standard_error(took_ns), 0.0, calls)


def _row(ns: float, noise_ns: float, idle_ns: float, calls: float, gain_ns: float = np.nan) -> pd.DataFrame:
    found = {"ns": ns, "noise_ns": noise_ns, "idle_ns": idle_ns, "calls": calls, "fused_gain_ns": gain_ns}
    return pd.DataFrame({name: [value] for name, value in found.items()})


def _fused_gain(
    what_if: Maybe[WhatIf], on_training_thread: Maybe[pd.DataFrame], rank: RankFacts, chosen: NDArray[np.bool_]
) -> float:
    """Return how much shorter the mean step would be, ns, with a share of the optimizer's kernels; `chosen` are theirs.

    NaN where no fused one of its kind is known, or the trace cannot be replayed.
    """
    noted: list[dict[str, Any]] = rank.facts.get("optimizers") or []
    largest = max(noted, key=lambda o: o.get("parameters") or 0, default={})
    left = FUSED_LEFT.get(str(largest.get("class")), (0.0, 0.0))[1]
    try:
        asked = what_if.get()
    except NotMeasured:
        return np.nan
    replay = asked.replay
    mine = np.flatnonzero(chosen[replay.rows])
    if not left or not len(mine):
        return np.nan
    durations = replay.durations.copy()
    # A share of the kernels remains, as long as they are, whatever their order.
    remains = np.floor(np.arange(1, len(mine) + 1) * left) > np.floor(np.arange(len(mine)) * left)
    longer = durations[mine].sum() * left / max(durations[mine][remains].sum(), 1)
    durations[mine] = np.where(remains, durations[mine] * longer, -1).astype(np.int64)
    thread = on_training_thread.get()
    return asked.gain_ns(durations=durations, other=((host.cover(thread, host.is_named(thread, *RANGES)), left),))


@within_rank
def launched_by_optimizer(
    on_training_thread: pd.DataFrame, device_work: pd.DataFrame, launched_within: Maybe[NDArray[np.int64]]
) -> NDArray[np.bool_]:
    """Return which rows of the device's work are kernels that the training thread launched in its optimizer.

    Only those of the steady traced steps. Raises NotMeasured where nothing marks the optimizer.
    """
    within = host.cover(on_training_thread, host.is_named(on_training_thread, *RANGES))
    if not len(within):
        raise NotMeasured("the trace does not tell what belongs to the optimizer")
    calls = host.is_kind(on_training_thread, "runtime")
    mine = on_training_thread["launch"].to_numpy()[calls][
        iv.holds(within, on_training_thread["start_ns"].to_numpy()[calls])
    ]
    inside = launched_within.get() >= 0
    chosen: NDArray[np.bool_] = host.is_kind(device_work, "kernel") & np.isin(
        device_work["launch"].to_numpy(), mine[mine >= 0]
    )
    return chosen & inside
