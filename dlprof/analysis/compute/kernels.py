"""The kernels of a rank: what launched them, the units they multiply on, and what shorter ones gain."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis.compute.kernel_names import UNITS, unit_of
from dlprof.analysis.compute.peaks import device_peaks
from dlprof.analysis.compute.products import SIXTEEN_BITS, TENSOR_SHARE, misaligned, saved_in_16_bits
from dlprof.analysis.engine import Maybe, RankFacts, per_rank, within_rank
from dlprof.analysis.timeline import device, host
from dlprof.analysis.timeline.device import DeviceSets
from dlprof.analysis.timeline.steps import Timing
from dlprof.analysis.timeline.what_if import LITTLE, WhatIf
from dlprof.errors import NotMeasured

# A backward pass computes twice what its forward pass does (Kaplan et al., Scaling Laws, 2020, section 2.1): the
# forward pass is a third of the computation.
FORWARD_SHARE = 1 / 3

# Multiples of the batch that are tried.
TIMES = (1.5, 2.0, 3.0, 4.0, 8.0)


@within_rank
def kernels(
    device_sets: DeviceSets,  # noqa: ARG001 - required: without a device in the trace nothing is known
    spans: pd.DataFrame,
    is_on_device: NDArray[np.bool_],
    device_work: pd.DataFrame,
    launched_within: NDArray[np.int64],
) -> pd.DataFrame:
    """Return the device's kernels that compute, with their row in the spans as index.

    Columns: name, dur_ns, step (the place of the steady traced step that launched it; -1: none), unit (what it
    multiplies on, see kernel_names.unit_of), owner (the row of the innermost operator that launched it; -1: not known).
    Raises NotMeasured where the trace holds no work of a device.
    """
    chosen = host.is_kind(device_work, "kernel")
    work = device_work[["name", "dur_ns", "launch"]][chosen]
    names = work["name"].cat
    units = pd.Categorical([unit_of(str(name)) for name in names.categories], ["", *UNITS])
    calls = np.flatnonzero(host.is_kind(spans, "runtime") & ~is_on_device & (spans["launch"].to_numpy() >= 0))
    owner = pd.Series(around(spans, is_on_device, "op", "runtime", of=calls)[calls], spans["launch"].to_numpy()[calls])
    return pd.DataFrame(
        {
            "name": work["name"],
            "dur_ns": work["dur_ns"].astype(float),
            "step": launched_within[chosen],
            "unit": units.take(names.codes.to_numpy()),
            "owner": owner[~owner.index.duplicated()].reindex(work["launch"], fill_value=-1).to_numpy(),
        }
    )


def around(
    spans: pd.DataFrame, is_on_device: NDArray[np.bool_], *kinds: str, of: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Return for each span the row of the innermost one around it on its thread, both of these kinds; -1: none.

    `of`: rows of these kinds, in order; only of them it is asked, which takes half of the time where they are few.
    """
    chosen = host.is_kind(spans, *kinds) & ~is_on_device
    lanes, starts, took = spans["lane"].cat.codes.to_numpy(), spans["start_ns"].to_numpy(), spans["dur_ns"].to_numpy()
    asked = None
    if of is not None:
        asked = np.zeros(len(spans), dtype=bool)
        asked[of] = True
    found = np.full(len(spans), -1, dtype=np.int64)
    for lane in np.unique(lanes[chosen]):
        rows = np.flatnonzero(chosen & (lanes == lane))
        start = starts[rows]
        end = start + took[rows]
        if asked is not None:
            reaching = _reaching(start, end, asked[rows])
            rows, start, end = rows[reaching], start[reaching], end[reaching]
        parent = host.parents(start, end)
        found[rows] = np.where(parent >= 0, rows[parent], -1)
    return found


def _reaching(start: NDArray[np.int64], end: NDArray[np.int64], asked: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which spans are asked of, or last until the next one that is begins: no other lies around one of them."""
    following = np.append(start[asked], np.iinfo(np.int64).max)[np.cumsum(asked, dtype=np.int32)]
    return asked | (end > following)


@within_rank
def shorter_kernels(
    kernels: pd.DataFrame, what_if: Maybe[WhatIf], timing: Timing, device_work: pd.DataFrame
) -> Callable[[NDArray[np.bool_], float | NDArray[np.float64]], float]:
    """Return a function of flags, one for each of `kernels`, and a share, or one for each: how much shorter the mean
    steady step would be, ns, were only that share left of the time of the kernels that are flagged.

    The device works no sooner than its host launches. Where the trace cannot be replayed, all that is shorter is
    gained.
    """

    def gain(chosen: NDArray[np.bool_], left: float | NDArray[np.float64]) -> float:
        share = pd.Series(np.where(chosen, left, 1.0), kernels.index)
        try:
            asked = what_if.get()
        except NotMeasured:
            inside = kernels["step"].to_numpy() >= 0
            return float((kernels["dur_ns"] * (1 - share))[inside].sum()) / max(len(timing.windows), 1)
        replay = asked.replay
        share = share.reindex(device_work.index[replay.rows], fill_value=1.0)
        durations = (replay.durations * share.to_numpy()).astype(np.int64)
        most = float((replay.durations - durations).sum()) / replay.steps
        return most if most < LITTLE * asked.measured_ns else asked.gain_ns(durations=durations)

    return gain


@per_rank
def tensor_cores(
    kernels: pd.DataFrame,
    timing: Timing,
    operators: pd.DataFrame,
    shorter_kernels: Callable[[NDArray[np.bool_], float], float],
    rank: RankFacts,
) -> pd.DataFrame:
    """Return one row, ns of a mean steady traced step: kernel_ns, tensor_ns (on tensor cores), tf32_ns (of these),
    float32_ns (products without them), unknown_ns (products on units that no name shows), and what the step would
    gain: fp32_saved_ns, were those in float32 in 16 bits; misaligned_ns and misaligned_saved_ns of products whose sizes
    do not suit tensor cores (NaN: peaks or sizes not known); aligned (1: sizes were looked at, 0: no shape is known).

    Only the names of kernels show these units, so tensor_ns is the least that it can be.
    Raises NotMeasured where the trace holds no work of a device.
    """
    took = kernels[kernels["step"] >= 0].groupby("unit", observed=False)["dur_ns"].sum() / len(timing.windows)
    _, peaks, bandwidth = device_peaks(rank.facts, rank.trace_facts)
    half = max((peaks.get(p, 0.0) for p in SIXTEEN_BITS), default=0.0) * TENSOR_SHARE
    saved = saved_in_16_bits(operators, half, bandwidth, peaks.get("float32", 0.0)) if half else math.nan
    odd, odd_saved, looked = misaligned(operators, peaks, bandwidth)

    def gain(saved_ns: float, *units: str) -> float:
        all_ns = float(took[list(units)].sum())
        if math.isnan(saved_ns) or not all_ns:
            return saved_ns
        return shorter_kernels(host.is_one_of(kernels["unit"], *units), max(0.0, 1 - saved_ns / all_ns))

    return pd.DataFrame(
        [
            {
                "kernel_ns": took.sum(),
                "tensor_ns": took["tensor"] + took["tf32"],
                "tf32_ns": took["tf32"],
                "float32_ns": took["float32"],
                "unknown_ns": took["unknown"],
                "fp32_saved_ns": gain(saved, "float32"),
                "misaligned_ns": odd,
                "misaligned_saved_ns": gain(odd_saved, "tensor", "unknown"),
                "aligned": int(looked),
            }
        ]
    )


@per_rank
def larger_batches(
    memory: Maybe[pd.DataFrame],
    what_if: WhatIf,
    device_work: pd.DataFrame,
    launched_by_optimizer: Maybe[NDArray[np.bool_]],
) -> pd.DataFrame:
    """Return for 1 and each of TIMES how much less the mean step would take for as many samples: times, gain_ns, and
    again_ns, the same where the forward pass is computed once more, as with checkpoints (below 0: it takes longer).

    By replaying the traced steps with every kernel and copy so many times as long, but for the least that a kernel
    takes, the optimizer's kernels and the exchanges, which are the same for any batch, as the host's work is. The
    forward pass is FORWARD_SHARE of the computation, and of the host's calls. Raises NotMeasured where the trace cannot
    be replayed, or whether a larger batch fits is not known.
    """
    if not memory:
        raise NotMeasured("nothing was asked of the CUDA allocator")
    by_optimizer = launched_by_optimizer.or_none()
    same = host.is_kind(device_work, "communication") | (False if by_optimizer is None else by_optimizer)
    durations = what_if.replay.durations
    longer = np.where(same[what_if.replay.rows], 0, np.maximum(durations - device.LEAST_KERNEL_NS, 0))
    forward = np.where(host.is_kind(device_work, "kernel")[what_if.replay.rows] & (longer > 0), FORWARD_SHARE, 0.0)
    rows = []
    for times in (1.0, *TIMES):
        grown = durations + (times - 1) * longer
        left = what_if.left(grown.astype(np.int64)) / times if times > 1 else 1.0
        again = what_if.left((grown * (1 + forward)).astype(np.int64), calls=1 + FORWARD_SHARE) / times
        rows.append((times, max(1 - left, 0.0) * what_if.measured_ns, (1 - again) * what_if.measured_ns))
    return pd.DataFrame(rows, columns=["times", "gain_ns", "again_ns"])
