"""One figure of two runs: how much it differs, and whether that is more than its noise.

A difference counts only beyond its noise: how the steps of each run vary and drift. What changes from one recording to
the next (another host, other jobs on it) is in no single run; LEAST_SHARE is for that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# A difference is significant from twice its standard error and this share of A's step on: two recordings of one job
# with steps of 50 ms were up to 0.9 % apart (docs/cost.md).
LEAST_NOISE = 2.0
LEAST_SHARE = 0.01

NOISE = (
    "±: twice the standard error of the difference, from how the steps of each run vary and drift. A difference below"
    " it, or below 1 % of A's step, is within noise. How much recordings of the same job differ is not part of it."
)

Verdict = Literal["faster", "slower", "noise", "unknown"]


@dataclass(frozen=True)
class Difference:
    """One part of the mean step in both runs, ns; None: not known. `noise_ns`: standard error of b_ns − a_ns."""

    name: str
    a_ns: float | None
    b_ns: float | None
    noise_ns: float | None = None
    least_ns: float = 0.0  # a smaller difference is within noise in any case

    @property
    def ns(self) -> float | None:
        """How much longer B takes, ns."""
        return None if self.a_ns is None or self.b_ns is None else self.b_ns - self.a_ns

    @property
    def verdict(self) -> Verdict:
        """Whether B is faster or slower; unknown where a figure or the noise is."""
        if self.ns is None:
            return "unknown"
        if abs(self.ns) < max(self.least_ns, LEAST_NOISE * (self.noise_ns or 0.0)) or self.ns == 0:
            return "noise"
        if self.noise_ns is None:
            return "unknown"
        return "faster" if self.ns < 0 else "slower"
