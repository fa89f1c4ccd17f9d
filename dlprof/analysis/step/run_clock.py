"""When a run began, which pictures over its time count from."""

from __future__ import annotations

import pandas as pd

from dlprof.analysis.engine import Frame, Maybe, across_ranks, maybe, needs
from dlprof.analysis.machine.samples import sample_series
from dlprof.analysis.timeline.steps import step_series

# Clocks that lie so far apart have nothing to do with each other: a log next to somebody else's traces.
_ANOTHER_CLOCK_NS = 7 * 86_400 * 10**9


@across_ranks
def first_times(
    step_series: Maybe[Frame] = maybe(step_series), sample_series: Maybe[Frame] = maybe(sample_series)
) -> tuple[int, ...]:
    """Return when the first step and the first sample were, as far as there are any, in ns of Unix time."""
    known = ((step_series.or_none(), "start_ns"), (sample_series.or_none(), "at_ns"))
    return tuple(int(frame[column].min()) for frame, column in known if frame is not None)


def began_ns(first_times: tuple[int, ...], own: float) -> int:
    """Return what a picture over the run counts from: when the first thing that is drawn over time was.

    `own` is when what the picture shows began; where all the rest lies a week away, it counts from there.
    """
    return min(at for at in (int(own), *first_times) if abs(at - own) < _ANOTHER_CLOCK_NS)


@across_ranks
def step_times(
    step_series: Frame = needs(step_series), first_times: tuple[int, ...] = needs(first_times)
) -> pd.Series[float]:
    """Return when each step began on the first rank that did, in ns from the run's beginning, by its number."""
    starts = step_series.groupby("step")["start_ns"].min()
    return starts - began_ns(first_times, step_series["start_ns"].min())
