"""Calls of the loader: how often the training thread asked for a batch."""

from __future__ import annotations

import pandas as pd

from dlprof.engine import RankData, per_rank
from dlprof.errors import NotMeasured
from dlprof.measures import host


@per_rank
def loader_calls(rank: RankData) -> pd.DataFrame:
    """Count next() on a DataLoader (one row): calls, and in_process (the loader is known to have no workers).

    Raises NotMeasured where neither the light layer nor a trace was recorded.
    """
    if not rank.has("spans") and not rank.has("steps"):
        raise NotMeasured("neither steps nor a trace were recorded")
    light = int(rank.table("steps")["fetches"].clip(lower=0).sum()) if rank.has("steps") else 0
    traced, single = 0, 0
    if rank.has("spans"):
        thread = host.on_training_thread(rank)
        traced = int(host.is_named(thread, "enumerate(DataLoader)").sum())
        single = int(host.is_named(thread, "enumerate(DataLoader)#_SingleProcess").sum())
    return pd.DataFrame({"calls": [max(light, traced)], "in_process": [single > 0 and single == traced]})
