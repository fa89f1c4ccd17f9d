"""What a larger batch would make of a device's step."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pandas as pd

from dlprof.engine import RankData, per_rank
from dlprof.errors import NotMeasured
from dlprof.measures.optimizer import launched_by_optimizer
from dlprof.timeline import device, host
from dlprof.timeline.what_if import what_if

# Multiples of the batch that are tried.
TIMES = (2, 4, 8)


@per_rank
def larger_batches(rank: RankData) -> pd.DataFrame:
    """Return for each of TIMES how much less the mean step would take for as many samples: times, gain_ns.

    By replaying the traced steps with every kernel and copy so many times as long, but for the least that a kernel
    takes, the optimizer's kernels and the exchanges, which are the same for any batch, as the host's work is. Raises
    NotMeasured where the trace cannot be replayed, or nobody knows whether a larger batch fits.
    """
    if not rank.has("memory"):
        raise NotMeasured("nothing was asked of the CUDA allocator")
    asked = what_if(rank)
    work = device.device_work(rank)
    same = host.is_kind(work, "communication")
    with suppress(NotMeasured):
        same = same | launched_by_optimizer(rank)
    same = same[asked.replay.rows]
    gains = []
    for times in TIMES:
        longer = (times - 1) * np.maximum(asked.replay.durations - device.LEAST_KERNEL_NS, 0)
        durations = asked.replay.durations + np.where(same, 0, longer)
        gains.append((1 - asked.left(durations=durations) / times) * asked.measured_ns)
    return pd.DataFrame({"times": TIMES, "gain_ns": np.maximum(gains, 0.0)})
