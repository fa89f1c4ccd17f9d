"""The oracles' arithmetic: steps and busy time from events, rates from a script's own lines, waits from its clocks."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

# The step's number as the reference workloads print it, every so many steps.
_STEP = re.compile(r"^step (\d+)\b")

# The mean step as the scripts of the check `advice` print it.
_SAID = re.compile(r"^STEP_MS (\d+(?:\.\d+)?)$")


@dataclass(frozen=True)
class Steps:
    """What CUDA events say of the steady steps: the device's period, how long it was busy, and the share of both."""

    step_ms: float
    busy_ms: float
    busy_share: float
    steps: int


def steady(began_ms: Sequence[float], busy_ms: Sequence[float], skip: int) -> Steps:
    """Return the steady steps of a job from when each began on the device and how long its work took there.

    A period is the time from one step's begin to the next one's, so that there is one fewer of them than steps. The
    first `skip` steps warm up. Medians, since a pause (writing a trace, say) is in one period and in no work; the share
    is that of each step by itself. Raises ValueError where no step is left, or the lengths differ.
    """
    if len(began_ms) != len(busy_ms):
        raise ValueError(f"{len(began_ms)} steps began and {len(busy_ms)} worked")
    periods = [after - before for before, after in pairwise(began_ms)]
    pairs = list(zip(periods, busy_ms, strict=False))[skip:]
    if not pairs or any(period <= 0 for period, _ in pairs):
        raise ValueError(f"no steady step among {len(began_ms)}, of which the first {skip} warm up")
    return Steps(
        median(period for period, _ in pairs),
        median(busy for _, busy in pairs),
        median(busy / period for period, busy in pairs),
        len(pairs),
    )


def mean_period_ms(began_ms: Sequence[float], first: int, last: int) -> float:
    """Return the mean period of the steps `first` to `last`, both included; NaN where the job did not go on so long."""
    if not 0 <= first <= last < len(began_ms) - 1:
        return math.nan
    return (began_ms[last + 1] - began_ms[first]) / (last + 1 - first)


def step_times(lines: Sequence[tuple[float, str]]) -> list[tuple[int, float]]:
    """Return the number of each step that a workload printed, and when its line came, in seconds."""
    found = [(_STEP.match(text), at) for at, text in lines]
    return [(int(match.group(1)), at) for match, at in found if match]


def step_ms_of_lines(lines: Sequence[tuple[float, str]], after: int) -> float:
    """Return a step's length from the lines of a workload that prints every so many steps, from step `after` on.

    The median of the intervals between lines, each divided by its steps: a pause between two epochs, or for writing a
    trace, is in one of them. NaN where fewer than two lines are left.
    """
    marks = [(number, at) for number, at in step_times(lines) if number >= after]
    each = [(later - sooner) / (m - n) * 1e3 for (n, sooner), (m, later) in pairwise(marks) if m > n]
    return median(each) if each else math.nan


def step_ms_said(lines: Sequence[tuple[float, str]]) -> float | None:
    """Return the mean step that a script printed of itself; None where it did not."""
    found = [match for _, text in lines if (match := _SAID.match(text))]
    return float(found[-1].group(1)) if found else None


def ratio(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return the median, least and greatest of a ÷ b over pairs of runs made one soon after the other."""
    each = [a / b for a, b in pairs if b > 0]
    if not each:
        return math.nan, math.nan, math.nan
    return median(each), min(each), max(each)


def lateness_ms(arrived_ns: Mapping[int, Sequence[int]], late: int, skip: int) -> float:
    """Return how much later than the others rank `late` came to what all wait for, the mean over the steps, in ms.

    `arrived_ns` holds each rank's times on one clock (CLOCK_MONOTONIC of one host), a step each. Against the earliest
    of the others, so that it is what that one waits. NaN where nothing is left after the first `skip` steps.
    """
    others = [times for rank, times in arrived_ns.items() if rank != late]
    steps = min((len(times) for times in arrived_ns.values()), default=0)
    waits = [arrived_ns[late][n] - min(times[n] for times in others) for n in range(skip, steps)] if others else []
    return sum(waits) / len(waits) / 1e6 if waits else math.nan


def inside(rows: Sequence[Mapping[str, Any]], key: str, at: str, begin: float, end: float) -> list[float]:
    """Return the values of `key` in the rows whose time `at` lies between `begin` and `end`, where they have one."""
    return [float(row[key]) for row in rows if key in row and row[key] is not None and begin <= row[at] <= end]


def middle(values: Sequence[float]) -> float | None:
    """Return the median; None where there are no values."""
    return median(values) if values else None
