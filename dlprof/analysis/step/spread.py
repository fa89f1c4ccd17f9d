"""How well the mean steady step of a rank is known: its standard error, with what drifts over the run."""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof.analysis.engine import Maybe, per_rank
from dlprof.analysis.timeline.steady import standard_error
from dlprof.analysis.timeline.steps import Timing
from dlprof.result import QUANTILES

# Steps that follow each other are alike: a clock that sinks or a neighbour on the machine holds for many of them. The
# means of so many stretches of the run show it, as the single steps do not.
STRETCHES = 10

# So many standard errors a figure must be away from nothing: what comes and goes by chance is no finding.
LEAST_NOISE = 2.0


@per_rank
def spread(timing: Timing, light_steps: Maybe[pd.DataFrame]) -> pd.DataFrame:
    """Return one row: steps, step_ns (their mean), noise_ns, its standard error (NaN: of a single step), and quantiles.

    noise_ns is the larger one of what the single steps tell and what the means of STRETCHES consecutive stretches tell.
    The QUANTILES of the steps are q0, q1, ... in ns.
    """
    if timing.source == "steps":
        frame = light_steps.get()
        values = frame.loc[frame["steady"], "length_ns"].to_numpy()
    else:
        values = (timing.windows[:, 1] - timing.windows[:, 0]).astype(float)
    noise = standard_error(values) if len(values) > 1 else np.nan
    if len(values) >= 2 * STRETCHES:
        means = np.array([part.mean() for part in np.array_split(values, STRETCHES)])
        noise = max(noise, standard_error(means))
    quantiles = {f"q{i}": [float(q)] for i, q in enumerate(np.quantile(values, QUANTILES))}
    return pd.DataFrame({"steps": [len(values)], "step_ns": [timing.step_ns], "noise_ns": [noise], **quantiles})
