"""How long ranks wait for the last of them, by their number: the mean of a maximum.

A step of a synchronous job ends when the slowest rank has done its work. If n ranks' own times are independent draws
from one distribution F, the slowest takes ∫ Q(u) d(uⁿ) in the mean, with Q the quantiles of F: the mean of the largest
order statistic (David, Nagaraja: Order Statistics, 2003). F is what the measured ranks show; beyond its 90th percentile
it goes on exponentially, with the mean excess of what was seen there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# Where the tail begins.
TAIL = 0.9
_POINTS = 4096


def mean_of_latest(late_ns: Sequence[float], ranks: int, *, tail: bool = True) -> float:
    """Return by how much the latest of so many ranks is later than their mean, ns.

    `late_ns`: evenly spaced quantiles of a rank's lateness, ascending. Without `tail`: nobody is later than the latest
    that was seen.
    """
    if ranks < 2 or len(late_ns) < 2:
        return 0.0
    values = np.asarray(late_ns, dtype=float)
    # Of the maximum of n: its quantile v is the distribution's quantile v^(1/n).
    at = ((np.arange(_POINTS) + 0.5) / _POINTS) ** (1.0 / ranks)
    places = (np.arange(len(values)) + 0.5) / len(values)
    found: NDArray[np.float64] = np.interp(at, places, values)
    if tail and len(values) * (1 - TAIL) >= 2:
        begin = float(np.interp(TAIL, places, values))
        excess = float(values[places > TAIL].mean() - begin)
        beyond = at > TAIL
        found[beyond] = begin + excess * np.log((1 - TAIL) / np.maximum(1 - at[beyond], 1e-300))
    return float(found.mean() - values.mean())
