"""How many times faster a change makes a job, how sure that is, and what follows.

A pair is a run with the change, and the runs without it just before and after: what drifts from run to run, a clock or
a neighbour on the machine, is in both. A pair's figure is the logarithm of its ratio; the interval is Student's. Two
pairs alone say little of how much pairs differ: how much the runs without the change differ from each other counts too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dlprof.result.tried import Gain, Verdict

# Two recordings of the same job are up to 0.9 % apart on a quiet machine (docs/cost.md): from twice that on, a change
# is worth an edit.
WORTH = 1.02

# A gain is known well enough when it is known to 5 %.
KNOWN = 1.05

MOST_PAIRS = 8

# Student's t for a two-sided 95 % interval, by degrees of freedom from 1 on.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)

# Two pairs in a row share the run without the change that is between them: of a variance of 1 + 2 / 4 of single runs
# they have 1 / 4 in common.
_SHARED = 1 / 6

# Of the differences between runs without the change: one has 2 single runs' variances, and a pair 1.5. Each run is in
# two differences, so that they count as fewer; and never as more than a few, as runs with the change may differ more.
_OF_PAIR = 1.5 / 2
_COUNTS, _MOST_COUNT = 2 / 3, 2.0


def gain(logs: Sequence[float], spread: Sequence[float] = ()) -> Gain:
    """Return the gain that the logarithms of pairs' ratios show; raise ValueError without one.

    `spread`: by how much the logarithm of the step differs from each run without the change to the next.
    """
    n = len(logs)
    if not n:
        raise ValueError("no pair")
    mean = math.fsum(logs) / n
    if n == 1:
        return Gain(math.exp(mean))
    counts = min(_COUNTS * len(spread), _MOST_COUNT)
    of_base = _OF_PAIR * math.fsum(x * x for x in spread) / len(spread) if spread else 0.0
    known = n - 1 + counts
    variance = (math.fsum((x - mean) ** 2 for x in logs) + counts * of_base) / known
    shared = (1 + 2 * _SHARED * (n - 1) / n) / (1 - 2 * _SHARED / n)
    half = _student(known) * math.sqrt(shared * variance / n)
    return Gain(math.exp(mean), math.exp(mean - half), math.exp(mean + half), n)


def _student(freedom: float) -> float:
    at = int(freedom) - 1
    return _STUDENT[at] if at < len(_STUDENT) else 1.96 + 2.5 / freedom


def verdict(g: Gain) -> Verdict:
    """Return what a gain says: the interval is all above WORTH, or all below; of a single pair nothing."""
    if g.low is None or g.high is None:
        return "unclear"
    if g.low > WORTH:
        return "gain"
    if g.high < 1 / WORTH:
        return "slower"
    return "no_gain" if g.high < WORTH else "unclear"


def answered(g: Gain) -> bool:
    """Return whether further pairs would tell nothing that matters: no gain, or one that is known to 5 %."""
    found = verdict(g)
    if found == "gain" and g.low is not None:
        return g.ratio / g.low <= KNOWN or g.pairs >= MOST_PAIRS
    return found != "unclear" or g.pairs >= MOST_PAIRS
