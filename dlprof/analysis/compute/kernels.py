"""The kernels of a rank: which there are, of what kind, how long they take, and on which units."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis.compute.kernel_names import unit_of
from dlprof.analysis.compute.peaks import device_peaks
from dlprof.analysis.compute.products import SIXTEEN_BITS, TENSOR_SHARE, misaligned, saved_in_16_bits
from dlprof.analysis.engine import Maybe, RankFacts, per_rank, within_rank
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import DeviceSets
from dlprof.analysis.timeline.steps import Timing
from dlprof.analysis.timeline.what_if import LITTLE, WhatIf
from dlprof.errors import NotMeasured
from dlprof.units import short


@within_rank
def kernels(device_work: pd.DataFrame) -> pd.DataFrame:
    """Return name and times of the device's kernels that compute, with their row in the spans as index."""
    return device_work[["name", "start_ns", "dur_ns"]][host.is_kind(device_work, "kernel")]


@within_rank
def kernels_within(launched_within: NDArray[np.int64], device_work: pd.DataFrame) -> NDArray[np.int64]:
    """Return for each row of `kernels` the place of the steady traced step that launched it; −1: none did."""
    chosen: NDArray[np.int64] = launched_within[host.is_kind(device_work, "kernel")]
    return chosen


@within_rank
def kernel_kinds(kernels: pd.DataFrame) -> NDArray[Any]:
    """Return of each of `kernels` what it multiplies on, as far as its name tells (kernel_names.unit_of)."""
    names = kernels["name"].cat
    kinds = np.asarray([unit_of(str(name)) for name in names.categories] or [""], dtype=str)
    return kinds[names.codes]


# What travels of the kernels: those that take longest.
MOST_KERNELS = 40


@per_rank
def kernel_times(
    device_sets: DeviceSets,  # noqa: ARG001 - required: of a trace without a device nothing is known
    timing: Timing,
    kernels: pd.DataFrame,
    kernels_within: NDArray[np.int64],
) -> pd.DataFrame:
    """Return the kernels that take longest: name, kind, calls and ns of a mean steady traced step; of all of them
    total_ns, and kernels, how many names there are.

    Raises NotMeasured where the trace holds no kernel.
    """
    windows = timing.windows
    inside = kernels_within >= 0
    names = kernels["name"].cat
    codes = names.codes.to_numpy()[inside]
    dur = kernels["dur_ns"].to_numpy(dtype=float)[inside]
    if not len(codes):
        raise NotMeasured("no kernel ran in the traced steps")
    calls = np.bincount(codes, minlength=len(names.categories))
    ns = np.bincount(codes, weights=dur, minlength=len(names.categories))
    chosen = np.argsort(-ns, kind="stable")
    chosen = chosen[calls[chosen] > 0][:MOST_KERNELS]  # a kernel may take no time at all
    texts = names.categories[chosen].tolist()
    return pd.DataFrame(
        {
            "name": [short(text, 200) for text in texts],
            "kind": [unit_of(text) for text in texts],
            "calls": calls[chosen] / len(windows),
            "ns": ns[chosen] / len(windows),
            "total_ns": float(dur.sum()) / len(windows),
            "kernels": int((calls > 0).sum()),
        }
    )


@per_rank
def tensor_cores(
    device_sets: DeviceSets,  # noqa: ARG001 - required: of a trace without a device nothing is known
    timing: Maybe[Timing],
    kernels: pd.DataFrame,
    kernels_within: Maybe[NDArray[np.int64]],
    kernel_kinds: NDArray[Any],
    operators: pd.DataFrame,
    what_if: Maybe[WhatIf],
    device_work: pd.DataFrame,
    rank: RankFacts,
) -> pd.DataFrame:
    """Return one row, ns of a mean steady traced step: kernel_ns, tensor_ns (on tensor cores), tf32_ns (of these),
    float32_ns (products without them), unknown_ns (products on units that no name tells), and what the step would
    gain: fp32_saved_ns, were those in float32 in 16 bits, misaligned_ns and misaligned_saved_ns of products whose sizes
    tensor cores do not like (NaN: peaks not known, or sizes), aligned (1: sizes were looked at, 0: no shape was told).

    Names are all that tells these units, so tensor_ns is the least that it can be.
    Raises NotMeasured where the trace holds no work of a device.
    """
    windows = timing.get().windows
    dur = kernels["dur_ns"].to_numpy(dtype=float)
    inside = kernels_within.get() >= 0
    n = len(windows)
    took = {k: float(dur[inside & (kernel_kinds == k)].sum()) / n for k in ("tensor", "tf32", "float32", "unknown")}
    _, peaks, bandwidth = device_peaks(rank.facts, rank.trace_facts)
    half = max((peaks.get(p, 0.0) for p in SIXTEEN_BITS), default=0.0) * TENSOR_SHARE
    saved = saved_in_16_bits(operators, half, bandwidth, peaks.get("float32", 0.0)) if half else math.nan
    odd, odd_saved, looked = misaligned(operators, peaks, bandwidth)

    def gained(saved_ns: float, took_ns: float, chosen: NDArray[np.bool_]) -> float:
        if math.isnan(saved_ns) or not took_ns:
            return saved_ns
        return shorter_kernels(
            kernels, what_if, kernels_within, timing, device_work, chosen, max(0.0, 1 - saved_ns / took_ns)
        )

    return pd.DataFrame(
        {
            "kernel_ns": [float(dur[inside].sum()) / n],
            "tensor_ns": [took["tensor"] + took["tf32"]],
            "tf32_ns": [took["tf32"]],
            "float32_ns": [took["float32"]],
            "unknown_ns": [took["unknown"]],
            "fp32_saved_ns": [gained(saved, took["float32"], kernel_kinds == "float32")],
            "misaligned_ns": [odd],
            "misaligned_saved_ns": [
                gained(odd_saved, took["tensor"] + took["unknown"], np.isin(kernel_kinds, ("tensor", "unknown")))
            ],
            "aligned": [int(looked)],
        }
    )


def shorter_kernels(
    kernels: pd.DataFrame,
    what_if: Maybe[WhatIf],
    kernels_within: Maybe[NDArray[np.int64]],
    timing: Maybe[Timing],
    device_work: pd.DataFrame,
    chosen: NDArray[np.bool_],
    left: float,
) -> float:
    """Return how much shorter the mean steady step would be, ns, with only a share `left` of some of `kernels`' time.

    The device works no sooner than its host launches. Where the trace cannot be replayed, all that is shorter is
    gained.
    """
    spans_of = kernels.index.to_numpy()[chosen]
    try:
        asked = what_if.get()
    except NotMeasured:
        mine = kernels["dur_ns"].to_numpy(dtype=float)[chosen & (kernels_within.get() >= 0)]
        return float(mine.sum()) * (1 - left) / max(len(timing.get().windows), 1)
    replay = asked.replay
    durations = replay.durations.copy()
    theirs = np.isin(device_work.index.to_numpy()[replay.rows], spans_of)
    durations[theirs] = (durations[theirs] * left).astype(np.int64)
    most = float((replay.durations - durations).sum()) / replay.steps
    if most < LITTLE * asked.measured_ns:
        return most
    return asked.gain_ns(durations=durations)
