"""Whether a run is slower than its baseline: the ratio of their median steps, with an interval from a bootstrap.

Blocks of consecutive steps are drawn anew from each run, as steps in a row are alike (Künsch, The Jackknife and the
Bootstrap for General Stationary Observations, 1989). A gate must not fail by chance: it fails where the run is slower
for sure, and by no less than the limit as far as the interval can tell. What differs from one recording to the next is
in no single run, and a limit should allow for it: 5 %, not 1 %.
"""

from __future__ import annotations

import math

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from dlprof.analysis.compare.comparison import compare
from dlprof.analysis.compare.ladder import other_job, unlike
from dlprof.errors import NotMeasured
from dlprof.result import Result
from dlprof.units import MINUS, percent

# The interval holds the ratio in 99 of 100 cases: below 1 % of the builds fail by chance.
_TAIL = 0.005
_NORMAL = 2.576  # the same of a normal distribution
_DRAWS = 2_000
_FEWEST = 30  # steps of each run; of fewer an interval says too little

# Stretches of a run, and Student's t for a 99 % interval of their mean.
_STRETCHES, _STUDENT = 10, 3.25

# Calibrated on made-up steps, each like the one before: see the test of this file.
_WIDER = 4.0


class Slowdown(Struct, frozen=True):
    """How many times as long the run takes for the same work as its baseline, and the 99 % interval of that.

    `what` is compared: "the median step", or "samples a second". `steps`: that the baseline, and the run, have of it.
    """

    ratio: float
    low: float
    high: float
    what: str
    steps: tuple[int, int]

    def fails(self, limit: float) -> bool:
        """Return whether the run is slower for sure, and not for sure by less than a limit, a share of the baseline."""
        return self.low > 1 and self.high > 1 + limit

    @property
    def words(self) -> str:
        """The ratio in words: "4.8 % slower (99 % interval +3.1 % to +6.5 %)"."""
        low, high = (f"{100 * (x - 1):+.1f} %".replace("-", MINUS) for x in (self.low, self.high))
        way = "slower" if self.ratio >= 1 else "faster"
        return f"{percent(abs(self.ratio - 1))} {way} (99 % interval {low} to {high})"


def slowdown(baseline: Result, run: Result, seed: int = 0) -> Slowdown:
    """Return how much slower a run is than its baseline; by samples a second where their steps do different work.

    Raises NotMeasured where the two are not runs of one job on the same devices, or too few steps are known.
    """
    if baseline.window is None or run.window is None:
        raise NotMeasured("one of the two has no steady step")
    why = other_job(baseline, run)
    c = compare(baseline, run)
    if why or (why := unlike(c)):
        raise NotMeasured(f"not a run of the same job as the baseline: {why}")
    work = 1.0 if c.rates is None or c.rates.same_work else c.rates.a_per_step / c.rates.b_per_step
    what = "the median step" if work == 1.0 else f"the time of a {c.rates.unit[:-1]}" if c.rates else ""
    a, b = (np.array(r.window.lengths_ns) for r in (baseline, run) if r.window)
    if min(len(a), len(b)) >= _FEWEST:
        ratio, low, high = bootstrap(a, b, seed)
        return Slowdown(ratio * work, low * work, high * work, what, (len(a), len(b)))
    return _by_means(baseline, run, work, what.replace("median", "mean"))


def _by_means(baseline: Result, run: Result, work: float, what: str) -> Slowdown:
    """Return the same by the mean steps and their noise: of a result that does not hold its steps' lengths."""
    one, other = baseline.window, run.window
    assert one is not None
    assert other is not None
    if one.noise_ns is None or other.noise_ns is None or min(one.steps, other.steps) < _FEWEST:
        raise NotMeasured(f"fewer than {_FEWEST} steady steps were measured in one of the two")
    ratio = work * other.step_ns / one.step_ns
    error = _NORMAL * ratio * math.hypot(one.noise_ns / one.step_ns, other.noise_ns / other.step_ns)
    return Slowdown(ratio, ratio - error, ratio + error, what, (one.steps, other.steps))


def bootstrap(a: NDArray[np.float64], b: NDArray[np.float64], seed: int = 0) -> tuple[float, float, float]:
    """Return the ratio of the medians of `b` and `a`, and its 99 % interval."""
    draw = np.random.default_rng(seed)
    ratios = _medians(b, draw) / _medians(a, draw)
    ratio = float(np.median(b) / np.median(a))
    # The basic interval: what the draws differ by from the estimate, it may differ by from the truth.
    low, high = np.quantile(np.log(ratios), (_TAIL, 1 - _TAIL))
    centre = math.log(ratio)
    # Blocks of few steps vary less than the steps do: by about this share.
    wider = 1 + _WIDER * max(_block(of) / len(of) for of in (a, b))
    least = _STUDENT * math.hypot(_drift(a), _drift(b))
    below, above = (max(wider * x, least) for x in (high - centre, centre - low))
    return ratio, math.exp(centre - below), math.exp(centre + above)


def _drift(values: NDArray[np.float64]) -> float:
    """Return the standard error of the logarithm of a run's median, as the medians of consecutive stretches show it.

    What holds for many steps, a neighbour on the host or a clock that sinks, is in no block that is shorter.
    """
    medians = np.log([float(np.median(part)) for part in np.array_split(values, _STRETCHES)])
    return float(medians.std(ddof=1)) / math.sqrt(_STRETCHES)


def _medians(values: NDArray[np.float64], draw: np.random.Generator) -> NDArray[np.float64]:
    """Return the medians of _DRAWS draws of blocks of the values; blocks go around the end."""
    n = len(values)
    block = _block(values)
    blocks = -(-n // block)
    starts = draw.integers(0, n, size=(_DRAWS, blocks))
    places = (starts[:, :, None] + np.arange(block)).reshape(_DRAWS, -1)[:, :n] % n
    medians: NDArray[np.float64] = np.median(values[places], axis=1)
    return medians


def _block(values: NDArray[np.float64]) -> int:
    """Return how long a block is: as long as steps are alike, but a tenth of the steps at most."""
    n = len(values)
    centred = values - np.median(values)
    # A single long step must not hide that the others are alike.
    limit = 5 * float(np.median(np.abs(centred))) or float(np.abs(centred).max()) or 1.0
    centred = np.clip(centred, -limit, limit)
    power = float((centred**2).sum()) or 1.0
    least, longest = 2 / math.sqrt(n), max(n // 10, 1)
    for lag in range(1, longest):
        if float((centred[lag:] * centred[:-lag]).sum()) / power < least:
            return min(max(2 * lag, int(n ** (1 / 3) + 0.5)), longest)
    return longest
