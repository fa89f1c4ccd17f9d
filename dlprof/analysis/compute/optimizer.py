"""What the optimizer's step takes: of the training thread on a CPU run, of the device and its idle time on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.compute.peaks import device_peaks
from dlprof.analysis.engine import RANK, Frame, Maybe, RankFacts, maybe, needs, per_rank, within_rank
from dlprof.analysis.step.partition import exposed_communication, in_optimizer, partition
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import device_work, has_device
from dlprof.analysis.timeline.host import on_training_thread
from dlprof.analysis.timeline.steady import light_steps, standard_error
from dlprof.analysis.timeline.steps import Timing, launched_within, timing
from dlprof.analysis.timeline.what_if import WhatIf, what_if
from dlprof.errors import NotMeasured

# What a fused step takes of an unfused one's time, on a CPU and on a GPU. On a CPU as measured with torch 2.13 on one
# core, over 50 to 200 small parameters and over 8 of a million values: 0.15 to 0.27 of a loop for Adam (0.27 to 0.30 of
# foreach), 0.15 to 0.50 for SGD with momentum. On a GPU by what is read and written: a fused Adam touches 7 values a
# parameter value and the terms one by one 20, SGD 5 and 11.
FUSED_LEFT = {"Adam": (0.25, 7 / 20), "AdamW": (0.25, 7 / 20), "SGD": (0.30, 5 / 11)}
_FUSED_VALUES = {"Adam": 7, "AdamW": 7, "SGD": 5}

# What a fused step takes a GPU's host: 0.71, 0.77 and 0.74 ms for 150, 180 and 201 parameter tensors (AdamW, torch
# 2.11, the 16-core host of an H200); one of foreach took 1.27 ms for 76.
_FUSED_HOST_NS, _FUSED_TENSOR_NS = 450_000, 1_600

# What copies reach of a GPU's memory bandwidth (88 % on an H200): a fused optimizer does no more than to copy.
_OF_BANDWIDTH = 0.85


@within_rank
def launched_by_optimizer(
    on_training_thread: Frame = needs(on_training_thread),
    in_optimizer: iv.Intervals = needs(in_optimizer),
    device_work: Frame = needs(device_work),
    launched_within: NDArray[np.int64] = needs(launched_within),
) -> NDArray[np.bool_]:
    """Return which rows of the device's work are kernels that the training thread launched in its optimizer.

    Only those of the steady traced steps. Raises NotMeasured where nothing marks the optimizer.
    """
    if not len(in_optimizer):
        raise NotMeasured("the trace does not mark the optimizer's step")
    calls = host.is_kind(on_training_thread, "runtime")
    calls &= iv.holds(in_optimizer, on_training_thread["start_ns"].to_numpy())
    launches = on_training_thread["launch"].to_numpy()[calls]
    theirs = host.is_among(device_work["launch"].to_numpy(), launches[launches >= 0])
    chosen = host.is_kind(device_work, "kernel") & theirs
    return chosen & (launched_within >= 0)


@within_rank
def fused_gain_ns(
    what_if: WhatIf = needs(what_if),
    in_optimizer: iv.Intervals = needs(in_optimizer),
    launched_by_optimizer: NDArray[np.bool_] = needs(launched_by_optimizer),
    rank: RankFacts = needs(RANK),
) -> float:
    """Return how much shorter the mean step would be, ns, with a fused optimizer.

    Its kernels take FUSED_LEFT of their time, or what their bytes take, its host what it was measured to take for as
    many parameters. Raises NotMeasured where no fused one of its kind is known, or the trace cannot be replayed.
    """
    optimizers: list[dict[str, Any]] = rank.facts.get("optimizers") or []
    largest = max(optimizers, key=lambda o: o.get("parameters") or 0, default={})
    name, tensors = str(largest.get("class")), int(largest.get("parameters") or 0)
    left = FUSED_LEFT.get(name, (0.0, 0.0))[1]
    mine = np.flatnonzero(launched_by_optimizer[what_if.replay.rows])
    now_ns = what_if.host_ns(in_optimizer)
    if not left or not len(mine) or not now_ns:
        raise NotMeasured("no fused optimizer of this class is known, or none of its kernels was traced")
    durations = what_if.replay.durations.copy()
    # Some of the kernels are left, evenly spread, and take all of the time that is left.
    chosen = np.linspace(0, len(mine) - 1, max(round(len(mine) * left), 1)).astype(int)
    device_ns = min(left * durations[mine].sum() / what_if.replay.steps, _moved_ns(rank, _FUSED_VALUES[name]))
    durations[mine] = -1
    durations[mine[chosen]] = device_ns * what_if.replay.steps / len(chosen)
    host_left = min((_FUSED_HOST_NS + _FUSED_TENSOR_NS * tensors) / now_ns, 1.0)
    return what_if.gain_ns(durations=durations, other=((in_optimizer, host_left),))


@within_rank
def optimizer_on_device(
    timing: Timing = needs(timing),
    device_work: Frame = needs(device_work),
    launched_within: NDArray[np.int64] = needs(launched_within),
    launched_by_optimizer: NDArray[np.bool_] = needs(launched_by_optimizer),
    partition: dict[str, iv.Intervals] = needs(partition),
    fused_gain_ns: Maybe[float] = maybe(fused_gain_ns),
) -> pd.DataFrame:
    """Return the row of `optimizer_work` on a device."""
    n = max(len(timing.windows), 1)
    step = launched_within[launched_by_optimizer]
    each = np.bincount(step, device_work["dur_ns"][launched_by_optimizer], n).astype(float)
    idle = iv.total(partition.get("optimizer_host", iv.EMPTY)) / n
    gain = fused_gain_ns.or_none()
    return _row(float(each.mean()) + idle, each, idle, len(step) / n, np.nan if gain is None else gain)


@within_rank
def optimizer_on_cpu(
    timing: Timing = needs(timing),
    spans: Maybe[Frame] = maybe(schema.SPANS),
    in_optimizer: Maybe[iv.Intervals] = maybe(in_optimizer),
    on_training_thread: Maybe[Frame] = maybe(on_training_thread),
    exposed_communication: Maybe[iv.Intervals] = maybe(exposed_communication),
    light_steps: Maybe[Frame] = maybe(light_steps),
) -> pd.DataFrame:
    """Return the row of `optimizer_work` on the CPU."""
    n = max(len(timing.windows), 1)
    calls, within, own, most = np.nan, iv.EMPTY, 1.0, np.inf
    if spans:
        within = iv.intersect(iv.merge(timing.windows), in_optimizer.get())
        thread = on_training_thread.get()
        operators = host.outermost(thread[host.is_kind(thread, "op")])
        calls = float(iv.holds(within, operators["start_ns"].to_numpy()).sum()) / n
        exchanging = iv.intersect(within, exposed_communication.get())
        own -= iv.total(exchanging) / max(iv.total(within), 1)
        within = iv.subtract(within, exchanging)
        most = iv.total(within) / n if len(exchanging) else np.inf
    if timing.source == "steps":
        frame = light_steps.get()
        each = np.maximum(frame.loc[frame["steady"], "optimizer_ns"].to_numpy(dtype=float), 0.0) * own
        each *= min(1.0, most / max(float(each.mean()), 1.0))
    else:
        each = iv.per_slot(within, np.append(timing.windows[:, 0], timing.windows[-1, 1])).astype(float)
    if not each.sum():
        raise NotMeasured("no optimizer was seen at work")
    return _row(float(each.mean()), each, 0.0, calls, np.nan)


@per_rank
def optimizer_work(
    has_device: bool = needs(has_device),
    optimizer_on_device: Maybe[Frame] = maybe(optimizer_on_device),
    optimizer_on_cpu: Maybe[Frame] = maybe(optimizer_on_cpu),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return one row, of a mean steady step: ns that optimizer takes, noise_ns, of it idle_ns in which a device waits
    for it, calls (of kernels; on the CPU of operators; NaN: not traced), and fused_gain_ns (how much shorter the
    device's step would be with FUSED_LEFT of it; NaN: no device, or not known).

    What it exchanges with other ranks (Horovod, ZeRO) is none of it, as far as a trace shows that; the rest is then no
    longer than in the traced steps, since what varies is the waiting. On a GPU `ns` is the time of the kernels that the
    optimizer launched, and that idle time. Raises NotMeasured where the optimizer's time is not known.
    """
    if has_device:
        return optimizer_on_device.get()
    if (rank.facts.get("device") or {}).get("type") not in ("cpu", None):
        raise NotMeasured("without a trace of its device, what the optimizer's kernels take is not known")
    return optimizer_on_cpu.get()


def _row(ns: float, each: NDArray[np.float64], idle_ns: float, calls: float, gain_ns: float) -> pd.DataFrame:
    row = {"ns": ns, "noise_ns": standard_error(each), "idle_ns": idle_ns, "calls": calls, "fused_gain_ns": gain_ns}
    return pd.DataFrame([row])


def _moved_ns(rank: RankFacts, values: float) -> float:
    """Return how long a device takes to move so many values for each trained one, ns; infinity where unknown."""
    _, _, bandwidth = device_peaks(rank.facts, rank.trace_facts)
    models: list[dict[str, Any]] = rank.facts.get("models") or []
    trained, size, count = (
        sum(int(m.get(name) or 0) for m in models) for name in ("trainable_parameters", "parameter_bytes", "parameters")
    )
    width = size / max(count, 1)
    return trained * width * values / (bandwidth * _OF_BANDWIDTH) * 1e9 if bandwidth and trained else np.inf
