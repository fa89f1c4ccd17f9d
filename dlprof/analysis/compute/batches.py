"""What a larger batch would make of a device's step."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis.engine import Maybe, per_rank
from dlprof.analysis.timeline import device, host
from dlprof.analysis.timeline.what_if import WhatIf
from dlprof.errors import NotMeasured

# Multiples of the batch that are tried.
TIMES = (2, 4, 8)


@per_rank
def larger_batches(
    memory: Maybe[pd.DataFrame],
    what_if: Maybe[WhatIf],
    device_work: Maybe[pd.DataFrame],
    launched_by_optimizer: Maybe[NDArray[np.bool_]],
) -> pd.DataFrame:
    """Return for each of TIMES how much less the mean step would take for as many samples: times, gain_ns.

    By replaying the traced steps with every kernel and copy so many times as long, but for the least that a kernel
    takes, the optimizer's kernels and the exchanges, which are the same for any batch, as the host's work is. Raises
    NotMeasured where the trace cannot be replayed, or nobody knows whether a larger batch fits.
    """
    if not memory:
        raise NotMeasured("nothing was asked of the CUDA allocator")
    asked = what_if.get()
    work = device_work.get()
    same = host.is_kind(work, "communication")
    with suppress(NotMeasured):
        same = same | launched_by_optimizer.get()
    same = same[asked.replay.rows]
    gains = []
    for times in TIMES:
        longer = (times - 1) * np.maximum(asked.replay.durations - device.LEAST_KERNEL_NS, 0)
        durations = asked.replay.durations + np.where(same, 0, longer)
        gains.append((1 - asked.left(durations=durations) / times) * asked.measured_ns)
    return pd.DataFrame({"times": TIMES, "gain_ns": np.maximum(gains, 0.0)})
