"""Two runs by the samples, or tokens, that they train on in a second: whose steps do different work compare by nothing
else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dlprof.analysis.compare.significance import LEAST_NOISE, LEAST_SHARE, Verdict
from dlprof.result import Result
from dlprof.result.throughput import Throughput

# Steps do the same work whose samples differ by no more: the last batch of an epoch is smaller.
_SAME_WORK = 0.01


@dataclass(frozen=True)
class Rates:
    """What both runs train on: so many samples (`unit`; or tokens) a second and a step.

    `of`: the whole job, or each rank. `noise`: standard error of b ÷ a; None: not known.
    """

    unit: str
    of: str
    a_per_s: float
    b_per_s: float
    a_per_step: float
    b_per_step: float
    noise: float | None = None

    @property
    def ratio(self) -> float:
        """How many times as much as A B trains on in a second."""
        return self.b_per_s / self.a_per_s

    @property
    def same_work(self) -> bool:
        """Whether a step of both runs is of as many samples."""
        return abs(self.b_per_step / self.a_per_step - 1) <= _SAME_WORK

    @property
    def verdict(self) -> Verdict:
        """Whether B is faster or slower; unknown where the noise is."""
        change = abs(self.ratio - 1)
        if change < max(LEAST_SHARE, LEAST_NOISE * (self.noise or 0.0)):
            return "noise"
        if self.noise is None:
            return "unknown"
        return "faster" if self.ratio > 1 else "slower"


def rates(a: Result, b: Result) -> Rates | None:
    """Return the rates of two runs; None where they are not known, or are those of different things.

    Of two that both know tokens, these count where a sample is not as long in both.
    """
    if a.window is None or b.window is None:
        return None
    one, other = a.window.throughput, b.window.throughput
    if one is None or other is None or one.of != other.of:
        return None
    if one.of == "rank" and a.run.world_size != b.run.world_size:
        return None
    noise = _noise(a, b)
    samples = _pair("samples", one, other, noise)
    tokens = _pair("tokens", one, other, noise)
    if samples is None or tokens is None:
        return samples or tokens
    as_long = (tokens.b_per_step / samples.b_per_step) / (tokens.a_per_step / samples.a_per_step)
    return samples if abs(as_long - 1) <= _SAME_WORK else tokens


def _pair(unit: str, a: Throughput, b: Throughput, noise: float | None) -> Rates | None:
    a_s, b_s, a_step, b_step = (getattr(t, f"{unit}_per_{of}") for of in ("s", "step") for t in (a, b))
    if not (a_s and b_s and a_step and b_step):
        return None
    return Rates(unit, a.of, a_s, b_s, a_step, b_step, None if noise is None else noise * b_s / a_s)


def _noise(a: Result, b: Result) -> float | None:
    """Return the standard error of the ratio of two runs' steps, as a share of it."""
    shares = [r.window.noise_ns / r.window.step_ns for r in (a, b) if r.window and r.window.noise_ns is not None]
    return math.hypot(*shares) if len(shares) == 2 else None
