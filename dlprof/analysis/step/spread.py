"""How well the mean steady step of a rank is known: its standard error, with what drifts over the run."""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof.analysis.engine import per_rank
from dlprof.analysis.timeline.steady import STRETCHES, standard_error, stretch_means
from dlprof.analysis.timeline.steps import Timing
from dlprof.result import QUANTILES

# So many standard errors a figure must be away from nothing: what comes and goes by chance is no finding.
LEAST_NOISE = 2.0


@per_rank
def spread(timing: Timing) -> pd.DataFrame:
    """Return one row: steps, step_ns (their mean), noise_ns, its standard error (NaN: of a single step), and quantiles.

    noise_ns is the larger one of what the single steps show and what the means of consecutive stretches show. The
    QUANTILES of the steps are q0, q1, ... in ns.
    """
    noise = timing.noise_ns if timing.steps > 1 else np.nan
    if timing.steps >= 2 * STRETCHES:
        noise = max(noise, standard_error(stretch_means(timing.lengths)))
    quantiles = {f"q{i}": float(q) for i, q in enumerate(np.quantile(timing.lengths, QUANTILES))}
    return pd.DataFrame([{"steps": timing.steps, "step_ns": timing.step_ns, "noise_ns": noise, **quantiles}])
