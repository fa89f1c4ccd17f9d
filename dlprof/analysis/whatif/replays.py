"""One rank's traced steps replayed with other speeds: what travels of a rank for a what-if.

Of a rank with a device, its steps are replayed with kernels, copies, the host and collectives as fast as asked. How
much of a collective is waiting for other ranks is known only across ranks: so its length is replayed at several shares,
and what lies between is interpolated. A rank without a device has no replay.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis.engine import Frame, Maybe, RankData, maybe
from dlprof.analysis.timeline import device, host
from dlprof.analysis.timeline.device import device_work
from dlprof.analysis.timeline.what_if import WhatIf, what_if
from dlprof.analysis.whatif.asked import Asked

# Shares of the collectives' length that are left.
LEFT = (0.0, 0.5, 1.0)

COLUMNS = ("change", "fetch", "communication", "ratio")


def replays(asked: Sequence[Asked], rank: RankData) -> pd.DataFrame:
    """Return how long the rank's step is with each change, as a multiple of its step as it is.

    Columns: change (its place in `asked`), fetch (1: with the wait for data as it is, 0: without), communication (the
    share of the collectives' length that is left), ratio. No rows where the trace cannot be replayed.
    """

    def ratios(what_if: Maybe[WhatIf] = maybe(what_if), device_work: Maybe[Frame] = maybe(device_work)) -> pd.DataFrame:
        steps = what_if.or_none()
        if steps is None or steps.measured_ns <= 0:
            return pd.DataFrame({c: pd.Series(dtype=float) for c in COLUMNS})
        work = device_work.get().iloc[steps.replay.rows]
        rows = []
        for n, one in enumerate(asked):
            for left in LEFT if one.network is not None else (1.0,):
                durations = _durations(one, work, steps.replay.durations, left)
                share = 1 / one.host if one.host else 1.0
                rows += [(n, fetch, left, steps.ratio(durations, fetch=fetch, host=share)) for fetch in (0.0, 1.0)]
        return pd.DataFrame(rows, columns=list(COLUMNS))

    return rank.call(ratios)


def _durations(asked: Asked, work: pd.DataFrame, now: NDArray[np.int64], left: float) -> NDArray[np.int64]:
    """Return how long each piece of the device's work takes; kernels keep the least that any kernel takes."""
    then = now.astype(float)
    if asked.device is not None:
        least = np.minimum(now, device.LEAST_KERNEL_NS)
        then = np.where(host.is_kind(work, "kernel"), least + (now - least) / asked.device, then)
    if asked.copies is not None:
        then = np.where(host.is_kind(work, "copy"), now / asked.copies, then)
    if asked.network is not None:
        then = np.where(host.is_kind(work, "communication"), now * left, then)
    durations: NDArray[np.int64] = np.rint(then).astype(np.int64)
    return durations
