"""The kernels of a rank: what launched them, the units they multiply on, and what shorter ones gain."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis.compute.kernel_names import UNITS, unit_of
from dlprof.analysis.compute.optimizer import launched_by_optimizer
from dlprof.analysis.engine import Frame, Maybe, maybe, needs, per_rank, within_rank
from dlprof.analysis.timeline import device, host
from dlprof.analysis.timeline.device import DeviceSets, device_sets, device_work
from dlprof.analysis.timeline.host import is_on_device
from dlprof.analysis.timeline.steps import Timing, launched_within, timing
from dlprof.analysis.timeline.what_if import LITTLE, WhatIf, what_if
from dlprof.errors import NotMeasured

# A backward pass computes twice what its forward pass does (Kaplan et al., Scaling Laws, 2020, section 2.1): the
# forward pass is a third of the computation.
FORWARD_SHARE = 1 / 3

# Multiples of the batch that are tried.
TIMES = (1.5, 2.0, 3.0, 4.0, 8.0)

# The device limits a step for nine tenths of which it works: from the same share on the verdict says that there is
# little else to lose (report/verdict.py).
FILLED = 0.9
_BISECTIONS = 9  # to a hundredth of a batch


@within_rank
def kernels(
    device_sets: DeviceSets = needs(device_sets),  # noqa: ARG001 - required: without a device in the trace nothing is known
    spans: Frame = needs(schema.SPANS),
    is_on_device: NDArray[np.bool_] = needs(is_on_device),
    device_work: Frame = needs(device_work),
    launched_within: NDArray[np.int64] = needs(launched_within),
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


def named(kernels: pd.DataFrame, holds: Callable[[str], bool]) -> NDArray[np.bool_]:
    """Return for each of some kernels whether something holds of its name."""
    names = kernels["name"].cat
    of_name = np.array([holds(str(name)) for name in names.categories], dtype=bool)
    found: NDArray[np.bool_] = of_name[names.codes.to_numpy()]
    return found


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
    kernels: Frame = needs(kernels),
    what_if: Maybe[WhatIf] = maybe(what_if),
    timing: Timing = needs(timing),
    device_work: Frame = needs(device_work),
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
def larger_batches(
    memory: Maybe[Frame] = maybe(schema.MEMORY),
    what_if: WhatIf = needs(what_if),
    device_work: Frame = needs(device_work),
    launched_by_optimizer: Maybe[NDArray[np.bool_]] = maybe(launched_by_optimizer),
) -> pd.DataFrame:
    """Return for 1 and each of TIMES how much less the mean step would take for as many samples: times, gain_ns, and
    again_ns, the same where the forward pass is computed once more, as with checkpoints (below 0: it takes longer).

    By replaying the traced steps with every kernel and copy so many times as long, but for the least that a kernel
    takes, the optimizer's kernels and the exchanges, which are the same for any batch, as the host's calls are. Waits
    for data grow with the batch, and so may the script's own Python: the gain is what is left if it does. The forward
    pass is FORWARD_SHARE of the computation, and of the host's calls.

    In every row: wait_share, of the present step, in which the device waits for its host or for data (without these the
    step would be so much shorter); and fills, the smallest multiple of the batch with which that is at most 1 − FILLED,
    if Python takes as long for any batch. NaN: if it does not, none in TIMES fills the device. Raises NotMeasured where
    the trace cannot be replayed, or whether a larger batch fits is not known.
    """
    if not memory:
        raise NotMeasured("nothing was asked of the CUDA allocator")
    by_optimizer = launched_by_optimizer.or_none()
    same = host.is_kind(device_work, "communication") | (False if by_optimizer is None else by_optimizer)
    durations = what_if.replay.durations
    longer = np.where(same[what_if.replay.rows], 0, np.maximum(durations - device.LEAST_KERNEL_NS, 0))
    forward = np.where(host.is_kind(device_work, "kernel")[what_if.replay.rows] & (longer > 0), FORWARD_SHARE, 0.0)

    def took(times: float, again: float = 0.0) -> NDArray[np.int64]:
        return ((durations + (times - 1) * longer) * (1 + again * forward)).astype(np.int64)

    def filled(times: float, python: float = 1.0) -> float:
        alone = what_if.ratio(took(times), fetch=0.0, host=0.0)
        return alone / what_if.left(took(times), fetch=times, python=python)

    rows = []
    for times in (1.0, *TIMES):
        left = what_if.left(took(times), fetch=times, python=times) / times
        again = what_if.left(took(times, 1.0), calls=1 + FORWARD_SHARE, fetch=times, python=times) / times
        rows.append((times, max(1 - left, 0.0) * what_if.measured_ns, (1 - again) * what_if.measured_ns))
    low, high = 1.0, TIMES[-1]
    if (now := filled(low)) >= FILLED:
        high = low
    elif filled(high, high) < FILLED:
        high = math.nan
    else:
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (low, middle) if filled(middle) >= FILLED else (middle, high)
    return pd.DataFrame(rows, columns=["times", "gain_ns", "again_ns"]).assign(wait_share=1 - now, fills=high)
