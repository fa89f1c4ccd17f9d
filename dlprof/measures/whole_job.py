"""Where the whole job went: its steady steps, and all that the figures of the steady step leave out.

Validation, an epoch's first and last batch, warming up: none of it is in the mean steady step, and by the definition
of a saving (how much shorter that step would be) no rule can put a figure on it. So it is told here, as it is.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof.engine import RankData, per_rank
from dlprof.measures.steps import light_steps

PARTS = ("setup", "warmup", "steady", "traced", "epoch_ends", "validation", "other")

# What happens within the steps of any part.
STALLS = ("checkpoint", "compilation", "garbage_collection")


@per_rank
def whole_job(rank: RankData) -> pd.DataFrame:
    """Give one row a part that there was: part, steps, ns. The PARTS add up to the rank's time from importing torch on.

    setup: up to the first recorded step; warmup: training steps before they have settled; traced: those slowed by the
    profiler; epoch_ends: training steps with an epoch's first batch or its end, where workers start and go; other:
    neither trained nor evaluated. STALLS follow, summed over all of these: they are within them, not beside. Raises
    NotMeasured where the light layer was not recorded.
    """
    frame = rank.once(light_steps)
    if not len(frame):
        return pd.DataFrame({"part": [], "steps": [], "ns": []}).astype({"part": "str"})
    kind = frame["kind"].astype("str").to_numpy()
    trains = kind == "train"
    part = np.select(
        [
            frame["profiled"].to_numpy() != 0,
            kind == "validation",
            ~trains,
            frame["first"].to_numpy() != 0,
            frame["steady"].to_numpy(),
        ],
        ["traced", "validation", "other", "epoch_ends", "steady"],
        "warmup",
    )
    dur = frame["dur_ns"].to_numpy(dtype=float)
    rows = [(p, int((part == p).sum()), float(dur[part == p].sum())) for p in PARTS if (part == p).any()]
    began = (rank.facts.get("clock") or {}).get("unix_ns")
    if isinstance(began, int) and began < frame["start_ns"].iloc[0]:
        rows.insert(0, ("setup", 0, float(frame["start_ns"].iloc[0] - began)))
    if rank.has("stalls"):
        found = rank.table("stalls")
        groups = found.assign(kind=found["kind"].astype("str")).groupby("kind")["dur_ns"]
        held = groups.agg(["size", "sum"])
        rows += [(k, int(held["size"][k]), float(held["sum"][k])) for k in STALLS if k in held.index]
    return pd.DataFrame(rows, columns=["part", "steps", "ns"])
