"""Whether the traced steps of a device job stand for all others, and what their trace lacks."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from dlprof.analysis.engine import Maybe, per_rank
from dlprof.analysis.timeline.steady import ENOUGH, standard_error
from dlprof.analysis.timeline.steps import Timing
from dlprof.analysis.timeline.traced import TracedSteps


@per_rank
def window_likeness(
    has_device: bool,
    timing: Maybe[Timing],
    trace_window: Maybe[TracedSteps],
    steps: Maybe[pd.DataFrame],
    light_steps: Maybe[pd.DataFrame],
) -> pd.DataFrame:
    """Return one row of a rank with a device: ratio, after, after_noise, linked, left_out, without_work.

    ratio: mean traced ÷ mean untraced step. after: mean untraced step after the traced ones ÷ before them, with its
    standard error after_noise. linked: the share of the device's work whose launch the trace holds. left_out: traced
    steps at the beginning in which the host only got its lead; without_work: those that launch nothing. NaN: not
    known. No row without a device.
    """
    if not has_device:
        return pd.DataFrame(
            columns=["ratio", "after", "after_noise", "linked", "left_out", "without_work"], dtype=float
        )
    t, found = timing.get(), trace_window.get()
    after, noise = _after(steps, light_steps)
    return pd.DataFrame(
        {
            "ratio": [np.nan if t.overhead is None else t.overhead],
            "after": [after],
            "after_noise": [noise],
            "linked": [found.linked],
            "left_out": [float((~found.settled).sum()) if found.unit == "step" else 0.0],
            "without_work": [float((~found.launches).sum())],
        }
    )


def _after(steps: Maybe[pd.DataFrame], light_steps: Maybe[pd.DataFrame]) -> tuple[float, float]:
    """Return how long steps are after the profiled ones, as a multiple of those before, and its standard error."""
    if not steps:
        return np.nan, np.nan
    marked = light_steps.get()
    profiled = np.flatnonzero(marked["profiled"].to_numpy() != 0)
    if not len(profiled):
        return np.nan, np.nan
    place, steady = np.arange(len(marked)), marked["steady"].to_numpy()
    length = marked["length_ns"].to_numpy()
    lengths = [length[steady & chosen] for chosen in (place < profiled[0], place > profiled[-1])]
    if min(map(len, lengths)) < ENOUGH:
        return np.nan, np.nan
    before, after = (float(np.median(each)) for each in lengths)  # a pause now and then is no sign of the profiler
    noise = math.hypot(*(standard_error(each) / before for each in lengths))
    return after / before, noise
