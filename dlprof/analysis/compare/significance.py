"""One figure of two runs: how much it differs, and whether that is more than its noise.

A difference counts only beyond the noise of what it was measured from. That noise is each run's own: how its steps vary
and drift. What changes from one recording to the next (another host, another neighbour on it) no single run can tell;
that is what LEAST_SHARE is for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# A difference is told where it is at least twice its standard error and this share of A's step: two recordings of one
# job with steps of 50 ms were up to 0.9 % apart (docs/cost.md).
LEAST_NOISE = 2.0
LEAST_SHARE = 0.01

NOISE = (
    "±: twice the standard error of the difference, from how the steps of each run vary and drift. A difference below"
    " it, or below 1 % of A's step, is within noise. How much two recordings of one job differ, no single pair tells."
)

Verdict = Literal["faster", "slower", "noise", "unknown"]


@dataclass(frozen=True)
class Difference:
    """One part of the step in both runs, ns of a mean step; None: not known. `noise_ns`: standard error of b_ns − a_ns.

    `noise_ns` is None where a run does not tell it: then nobody knows whether the difference is one.
    """

    name: str
    a_ns: float | None
    b_ns: float | None
    noise_ns: float | None = None
    least_ns: float = 0.0  # below this, a difference is none whatever its noise

    @property
    def ns(self) -> float | None:
        """What B takes longer, ns."""
        return None if self.a_ns is None or self.b_ns is None else self.b_ns - self.a_ns

    @property
    def verdict(self) -> Verdict:
        """Say whether B is faster or slower, or within the noise, or that it is not known."""
        if self.ns is None:
            return "unknown"
        if abs(self.ns) < max(self.least_ns, LEAST_NOISE * (self.noise_ns or 0.0)) or self.ns == 0:
            return "noise"
        if self.noise_ns is None:
            return "unknown"
        return "faster" if self.ns < 0 else "slower"
