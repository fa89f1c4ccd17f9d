"""How long ranks wait for the last of them, by their number: the mean of a maximum.

A step of a synchronous job ends when the slowest rank has done its work. If n ranks' own times are independent draws
from one distribution F, the slowest takes ∫ Q(u) d(uⁿ) in the mean, with Q the quantiles of F: the mean of the largest
order statistic (David, Nagaraja: Order Statistics, 2003). A rank's own time is what the rank usually takes, and what a
single step takes longer. Ranks differ in the former for good: a few of them show no more than how far they are apart,
and more ranks are taken to be normally distributed. Of single steps there are many; beyond their 90th percentile they
go on exponentially, with the mean excess of what was seen there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

# Where the tail begins.
TAIL = 0.9

# So many ranks show the distribution that they are drawn from; of fewer, a normal one is assumed.
ENOUGH_RANKS = 64

_POINTS = 512  # of each distribution: their sum has the square of it
_ALONE = 1 << 15  # of one whose other is nothing
_INTEGRAL = 4096


@dataclass(frozen=True)
class Lateness:
    """How far ranks are apart: `uneven_ns` and `late_ns` of result.scale.Scaling."""

    uneven_ns: tuple[float, ...]
    late_ns: tuple[float, ...]

    def mean_of_latest(self, ranks: int, *, tail: bool = True) -> float:
        """Return by how much the latest of so many ranks is later than their mean, ns.

        Without `tail`: nobody is later than the latest that was seen.
        """
        if ranks < 2:
            return 0.0
        values = self._with_tail if tail else self._seen
        # Of the maximum of n: its quantile v is the distribution's quantile v^(1/n).
        at = ((np.arange(_INTEGRAL) + 0.5) / _INTEGRAL) ** (1.0 / ranks)
        found = np.interp(at, (np.arange(len(values)) + 0.5) / len(values), values)
        return float(found.mean() - values.mean())

    @property
    def spread_ns(self) -> float:
        """How far ranks are apart for good: the standard deviation."""
        return float(np.std(self.uneven_ns)) if self.uneven_ns else 0.0

    @cached_property
    def _with_tail(self) -> NDArray[np.float64]:
        normal = 0 < len(self.uneven_ns) < ENOUGH_RANKS and self.spread_ns > 0
        uneven = self.spread_ns * _normal(self._points) if normal else _drawn(self.uneven_ns, self._points)
        return _sum(uneven, _drawn(self.late_ns, self._points, tail=True))

    @cached_property
    def _seen(self) -> NDArray[np.float64]:
        return _sum(_drawn(self.uneven_ns, self._points), _drawn(self.late_ns, self._points))

    @property
    def _points(self) -> int:
        return _POINTS if any(self.uneven_ns) and any(self.late_ns) else _ALONE


def _sum(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the distribution of the sum of two independent draws, as sorted values."""
    sums: NDArray[np.float64] = np.sort(np.add.outer(a, b).ravel())
    return sums


def _drawn(values: Sequence[float], points: int, *, tail: bool = False) -> NDArray[np.float64]:
    """Return so many evenly spaced quantiles of the distribution that some values show; one 0 where all are 0."""
    if not any(values):
        return np.zeros(1)
    seen = np.sort(np.asarray(values, dtype=float))
    at, places = (np.arange(points) + 0.5) / points, (np.arange(len(seen)) + 0.5) / len(seen)
    found: NDArray[np.float64] = np.interp(at, places, seen)
    if tail and len(seen) * (1 - TAIL) >= 2:
        begin = float(np.interp(TAIL, places, seen))
        excess = float(seen[places > TAIL].mean() - begin)
        beyond = at > TAIL
        found[beyond] = begin + excess * np.log((1 - TAIL) / (1 - at[beyond]))
    return found


def _normal(points: int) -> NDArray[np.float64]:
    """Return so many evenly spaced quantiles of the standard normal distribution."""
    from statistics import NormalDist

    draw = NormalDist()
    return np.array([draw.inv_cdf((n + 0.5) / points) for n in range(points)])


def uncertainty(ranks: int) -> float:
    """Return the relative standard error of a standard deviation that so many ranks show."""
    return 1.0 / math.sqrt(2.0 * max(ranks - 1, 1))
