"""Much of the job's time goes to validation.

Between the training steps the model is evaluated on held-out data. No step becomes shorter by doing that less often or
faster, but the job does.

Needs the light layer, in which steps without a backward pass and without an optimizer's step are validation, and two
phases of it: of one alone nobody knows how often it comes.

Saving: what validating half as often would save; where one rank validates while others wait, or each rank validates the
whole set, what sharing it out would save. This time is not in the steady steps: it is spread over the training steps,
and its share is that of the training loop.

What to change: validate less often, or on a fixed part of the data and on all of it only now and then; share it out
over the ranks; `torch.inference_mode()` and the training's autocast; a larger batch than in training, since nothing is
kept for a backward pass; as many loader workers as for training.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from dlprof.analysis.engine import Job, Maybe
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing, worst
from dlprof.errors import NotMeasured
from dlprof.result import Change, Panel
from dlprof.units import count, digits, duration, percent

# More than this of validation in the loader is called high by the same tools.
WAITS = 0.2


def check(
    validation: pd.DataFrame, loop_step_ns: Maybe[float], training_steps: Maybe[pd.Series[float]], job: Job
) -> Estimate:
    """Estimate what validation takes of the training loop, and what less of it would give."""
    frame = validation.set_index("rank")
    if not frame["phases"].sum():
        return nothing("nothing was validated")
    if frame["phases"].max() < 2:
        raise NotMeasured("one phase of validation was recorded: how often it comes is not known")
    loop, steps = loop_step_ns.get(), training_steps.get().reindex(frame.index)
    takes = {int(str(r)): float(ns) for r, ns in (frame["phases"] * frame["phase_ns"] / steps).items()}
    # Where one rank validates the others wait for it, so the one that takes longest counts for all.
    rank = worst(takes)
    told = frame.to_dict("index")[rank]
    shared, why = _alone(job, frame, told)
    part = 1 - 1 / shared if shared > 1 else 0.5
    return Estimate(
        saving_ns=takes[rank] * part,
        by_rank_ns=takes,
        noise_ns=float(told["noise_ns"] * told["phases"] / steps[rank]) * part,
        lost_ns=takes[rank],
        scope="job",
        loses="is validation",
        explain=lambda: _explain(job, rank, takes[rank] / loop, told, shared, why),
    )


def _explain(job: Job, rank: int, share: float, told: dict[Any, Any], shared: int, why: str) -> Explanation:
    return Explanation(
        title=f"Validation takes {percent(share)} of the training loop's time",
        summary=f"Every {digits(told['every'])} training steps rank {rank} validates for {duration(told['phase_ns'])},"
        f" in {count(told['fetches'], 'batch')}; {percent(told['fetch_share'])} of it waits for data.{why}",
        changes=tuple(_changes(job, rank, told, shared)),
        evidence=_evidence(share, told, shared),
        sure="Measured over the whole job; "
        + (f"estimated as shared out evenly over {shared} ranks." if shared > 1 else "estimated as half of it gone.")
        + " A job that validates less often than the recorded part of it has less to gain.",
    )


def _setting(job: Job, rank: int) -> dict[str, Any]:
    loaders = job.facts[rank].get("loaders") or []
    return next((dict(x) for x in loaders if x.get("role") == "validation"), {})


def _alone(job: Job, frame: pd.DataFrame, told: dict[Any, Any]) -> tuple[int, str]:
    """Return over how many ranks validation could be shared out that is not, and say so; 1: it is, or nobody knows."""
    here, world = len(job.ranks), job.world_size
    silent = int((frame["phases"] == 0).sum())
    if world > 1 and here == world and silent == here - 1:
        return world, " The other ranks wait for it."
    loader = _setting(job, int(str(frame["phases"].idxmax())))
    size, samples = loader.get("batch_size"), loader.get("dataset_length")
    if world > 1 and size and samples and told["fetches"] >= samples // size:
        return world, f" Each rank goes through all of its {samples:,} samples."
    return 1, ""


def _changes(job: Job, rank: int, told: dict[Any, Any], shared: int) -> Iterator[Change]:
    loader = _setting(job, rank)
    if shared > 1:
        yield change(
            f"share it out over the {shared} ranks: `DistributedSampler(validation_set, shuffle=False)`, and"
            " `all_reduce` the sums",
            shuffle=(None, False),
        )
    yield change(f"validate every {2 * told['every']:.0f} steps (is {digits(told['every'])}), or on part of the data")
    if told["fetch_share"] > WAITS:
        now = f" (is {loader['num_workers']})" if loader.get("num_workers") is not None else ""
        yield change(
            f"more `num_workers`{now} and `persistent_workers=True` on validation's loader:"
            f" {percent(told['fetch_share'])} of validation waits for it",
            persistent_workers=(loader.get("persistent_workers"), True),
        )
    autocast = job.facts[rank].get("autocast") or {}
    mixed = f" and autocast ({autocast['dtype']}, as training)" if autocast.get("enabled") else ""
    size = f" (is {loader['batch_size']})" if loader.get("batch_size") else ""
    yield change(
        f"`torch.inference_mode()`{mixed}; a larger batch{size}, since nothing is kept for a backward pass",
        numerics=bool(mixed),
    )


def _evidence(share: float, told: dict[Any, Any], shared: int) -> Panel:
    gone = {"as it is": 0.0, **({f"shared out over {shared} ranks": 1 - 1 / shared} if shared > 1 else {})}
    gone |= {"half as often": 0.5, "a quarter as often": 0.75}
    if told["fetch_share"] > WAITS:
        gone["with no waiting for data"] = float(told["fetch_share"])
    rows = tuple((said, share * (1 - less), share * less, 1 / (1 - share * less)) for said, less in gone.items())
    columns = ("validation", "share", "saved_share", "speed of the job_times")
    return Panel("table", "Shares of the training loop with less validation", rows, columns)


RULE = Rule(
    "validation_share",
    "Time for validation",
    check,
    # Validation must be, so it is worth a word only where doing something about it gives what tools for input call
    # notable: 5 % (XProf). Validating half as often gives that from 10 % of the loop on.
    notable=0.05,
)
