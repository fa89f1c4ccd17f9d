"""The settings of the job that its recording overrode (`--set`)."""

from __future__ import annotations

import pandas as pd

from dlprof import schema
from dlprof.analysis.engine import Frame, needs, per_rank
from dlprof.errors import NotMeasured


@per_rank
def override_effects(overrides: Frame = needs(schema.OVERRIDES)) -> pd.DataFrame:
    """Return the table "overrides"; raises NotMeasured where nothing was overridden."""
    if not len(overrides):
        raise NotMeasured("no setting was overridden")
    return overrides.astype({"name": str, "value": str, "before": str, "file": str, "function": str, "error": str})
