"""What validating takes: how often it comes, how long it lasts, and what its steps wait for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from dlprof.analysis.engine import Job, across_ranks, per_rank
from dlprof.analysis.timeline.steady import standard_error


@per_rank
def validation(light_steps: pd.DataFrame) -> pd.DataFrame:
    """Return one row of the phases of validation: validation steps with no training step between them.

    Columns: phases, steps (of validation), every (training steps between the starts of two phases, the median; NaN: of
    one phase it is not known), phase_ns (the mean phase) and its standard error noise_ns, fetch_share (of it, waiting
    in the loader), fetches (batches a phase). Raises NotMeasured where the step log was not recorded.
    """
    steps = light_steps[light_steps["kind"] != "suspended"]
    validates = (steps["kind"] == "validation").to_numpy()
    begins = validates & ~np.append(False, validates[:-1])
    trained = np.cumsum(steps["kind"] == "train").to_numpy()
    mine = steps[validates]
    took = mine.groupby(np.cumsum(begins)[validates])["length_ns"].sum().to_numpy(dtype=float)
    total, phases = float(mine["dur_ns"].sum()), max(len(took), 1)
    row = {
        "phases": len(took),
        "steps": len(mine),
        "every": float(np.median(np.diff(trained[begins]))) if len(took) > 1 else np.nan,
        "phase_ns": float(took.sum()) / phases,
        "noise_ns": standard_error(took),
        "fetch_share": float(mine["fetch_ns"].clip(lower=0).sum()) / total if total else 0.0,
        "fetches": float(mine["fetches"].clip(lower=0).sum()) / phases,
    }
    return pd.DataFrame([row])


@across_ranks
def validation_cost(validation: pd.DataFrame, training_steps: pd.Series[float], job: Job) -> pd.DataFrame:
    """Return `validation` with what a rank's validation takes for each training step: cost_ns, its error cost_noise_ns.

    `among` is over how many ranks it could be shared out that it is not (1: it is, or that is not known), and `samples`
    how many of them each rank goes through all by itself; 0: not known, or one rank validates while others wait.
    """
    steps = training_steps.reindex(validation["rank"]).to_numpy()
    frame = validation.assign(
        cost_ns=validation["phases"] * validation["phase_ns"] / steps,
        cost_noise_ns=validation["phases"] * validation["noise_ns"] / steps,
        among=1,
        samples=0,
    )
    world = job.world_size
    if world == len(job.ranks) > 1 and (frame["phases"] > 0).sum() == 1:
        return frame.assign(among=world)
    loader = validation_loader(job, int(frame["rank"][frame["phases"].idxmax()]))
    size, samples = loader.get("batch_size"), loader.get("dataset_length")
    if world > 1 and size and samples:
        all_of_it = frame["fetches"] >= samples // size
        frame = frame.assign(among=np.where(all_of_it, world, 1), samples=np.where(all_of_it, samples, 0))
    return frame


def validation_loader(job: Job, rank: int) -> dict[str, Any]:
    """Return the settings of a rank's validation loader; empty where none was seen."""
    loaders = job.facts[rank].get("loaders") or []
    return next((dict(x) for x in loaders if x.get("role") == "validation"), {})
