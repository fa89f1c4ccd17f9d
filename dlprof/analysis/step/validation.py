"""What validating takes: how often it comes, how long it lasts, and what its steps wait for."""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof.analysis.engine import per_rank
from dlprof.analysis.timeline.steady import standard_error


@per_rank
def validation(light_steps: pd.DataFrame) -> pd.DataFrame:
    """Return one row of the phases of validation: validation steps with no training step between them.

    Columns: phases, steps (of validation), every (training steps between the starts of two phases, the median; NaN: of
    one phase nobody knows), phase_ns (the mean phase) and its standard error noise_ns, fetch_share (of it, waiting in
    the loader), fetches (batches a phase). Raises NotMeasured where the light layer was not recorded.
    """
    steps = light_steps
    kind = steps["kind"].astype("str").to_numpy()
    steps, kind = steps[kind != "suspended"], kind[kind != "suspended"]
    validates = kind == "validation"
    begins = validates & ~np.append(False, validates[:-1])
    trained = np.cumsum(kind == "train")
    mine = steps[validates].assign(phase=np.cumsum(begins)[validates])
    took = mine.groupby("phase")["length_ns"].sum().to_numpy(dtype=float)
    total = float(mine["dur_ns"].sum())
    return pd.DataFrame(
        {
            "phases": [len(took)],
            "steps": [len(mine)],
            "every": [float(np.median(np.diff(trained[begins]))) if len(took) > 1 else np.nan],
            "phase_ns": [float(took.mean()) if len(took) else 0.0],
            "noise_ns": [standard_error(took)],
            "fetch_share": [float(mine["fetch_ns"].clip(lower=0).sum()) / total if total else 0.0],
            "fetches": [float(mine["fetches"].clip(lower=0).sum()) / len(took) if len(took) else 0.0],
        }
    )
