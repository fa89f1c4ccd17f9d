"""Where the whole job went: its steady steps, and all that the figures of the steady step leave out.

Validation, an epoch's first and last batch, warming up: none of it is in the mean steady step, and what it costs is no
saving of that step. It is told here as it is, and set against what the whole training loop takes.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof.analysis.engine import Maybe, RankFacts, across_ranks, per_rank
from dlprof.errors import NotMeasured

PARTS = ("setup", "warmup", "steady", "traced", "epoch_ends", "validation", "other", "suspended")

# What happens within the steps of any part.
STALLS = ("checkpoint", "compilation", "garbage_collection")


@per_rank
def whole_job(light_steps: pd.DataFrame, stalls: Maybe[pd.DataFrame], rank: RankFacts) -> pd.DataFrame:
    """Return one row a part that there was: part, steps, ns. The PARTS add up to rank's time from importing torch on.

    setup: up to the first recorded step; warmup: training steps before they have settled; traced: those slowed by the
    profiler; epoch_ends: training steps with an epoch's first batch or its end, where workers start and go, but for the
    job's very first step; other: neither trained nor evaluated; suspended: steps of any kind in which the job was
    stopped. STALLS follow, summed over all of these: they are within them, not beside. Raises NotMeasured where the
    light layer was not recorded.
    """
    if not len(light_steps):
        return pd.DataFrame({"part": [], "steps": [], "ns": []}).astype({"part": "str"})
    kind = light_steps["kind"].astype("str").to_numpy()
    trains = kind == "train"
    part = np.select(
        [
            kind == "suspended",
            light_steps["profiled"].to_numpy() != 0,
            kind == "validation",
            ~trains,
            (light_steps["first"].to_numpy() != 0) & (np.cumsum(trains) > 1),
            light_steps["steady"].to_numpy(),
        ],
        ["suspended", "traced", "validation", "other", "epoch_ends", "steady"],
        "warmup",
    )
    dur = light_steps["length_ns"].to_numpy()
    rows = [(p, int((part == p).sum()), float(dur[part == p].sum())) for p in PARTS if (part == p).any()]
    began = (rank.facts.get("clock") or {}).get("unix_ns")
    if isinstance(began, int) and began < light_steps["start_ns"].iloc[0]:
        rows.insert(0, ("setup", 0, float(light_steps["start_ns"].iloc[0] - began)))
    if stalls:
        found = stalls.get()
        held = found.assign(kind=found["kind"].astype("str")).groupby("kind")[["count", "dur_ns"]].sum()
        rows += [(k, int(held["count"][k]), float(held["dur_ns"][k])) for k in STALLS if k in held.index]
    return pd.DataFrame(rows, columns=["part", "steps", "ns"])


@across_ranks
def loop_step_ns(whole_job: pd.DataFrame, training_steps: Maybe[pd.Series[float]]) -> float:
    """Return what the training loop takes for each training step with all that lies between them: the ranks' mean, ns.

    As in a job that runs for long: steps that warm up or are traced count as steady ones, and setting up not at all.
    Raises NotMeasured where no steady step was recorded.
    """
    steps, ns = (whole_job.pivot_table(index="rank", columns="part", values=c) for c in ("steps", "ns"))
    steps, ns = (t.reindex(columns=list(PARTS)).fillna(0.0) for t in (steps, ns))
    if not len(steps) or not (steps["steady"] > 0).all():
        raise NotMeasured("no steady training step was recorded")
    plain = steps["steady"] + steps["warmup"] + steps["traced"]
    beside = ns["epoch_ends"] + ns["validation"] + ns["other"]
    loop = plain * ns["steady"] / steps["steady"] + beside
    return float((loop / training_steps.get()).mean())


@across_ranks
def training_steps(whole_job: pd.DataFrame) -> pd.Series[float]:
    """Count each rank's training steps, in whatever part of the job; by rank."""
    return (
        whole_job[whole_job["part"].isin(("warmup", "steady", "traced", "epoch_ends"))].groupby("rank")["steps"].sum()
    )
