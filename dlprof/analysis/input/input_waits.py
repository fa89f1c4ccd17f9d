"""How long each rank waits for data, who waits for whom because of it, and what a faster loader would save."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.engine import Job, Maybe, across_ranks, by_rank
from dlprof.analysis.input.fetch_replay import SAMPLES
from dlprof.analysis.input.loader import gained
from dlprof.analysis.input.paces import Paces
from dlprof.analysis.input.worker_plans import Plan, freed_by_cheaper, planned, step_with_cheaper
from dlprof.analysis.step.breakdown import part
from dlprof.analysis.step.headroom import room
from dlprof.analysis.step.savings import saving_input
from dlprof.errors import NotMeasured
from dlprof.units import duration, percent

# From here on a wait is worth a change: XProf's input pipeline analyzer and the TensorBoard plugin say 5 %.
NOTABLE_SHARE = 0.05

# More workers are what is missing where they give the larger part of what there is to gain.
LARGER_PART = 0.5

# Workers that compute slow everything that computes beside them, and who waits for data launches late.
SAVES_FROM = ("computation", "communication", "input_wait", "optimizer_host", "host", "launch_latency", "other")


@across_ranks
def input_waits(
    loader_calls: pd.DataFrame,
    before_forward: Maybe[tuple[int, float] | None],
    mean_step_ns: Maybe[float],
    breakdown: Maybe[pd.DataFrame],
    fetch_gains: Maybe[pd.DataFrame],
    loader_means: Maybe[pd.DataFrame],
) -> pd.DataFrame:
    """Return what each rank's wait for data costs the mean steady step, wait_ns, and taken_ns, taking ready batches.

    wait_ns is the exposed wait; with a device, what the rank's own step would be shorter by without it. Raises
    NotMeasured where no loader was seen.
    """
    if not loader_calls["calls"].sum():
        raise NotMeasured(_no_loader(before_forward.get(), mean_step_ns))
    wait = part(breakdown.get(), "input_wait")
    if not fetch_gains.lacking:
        frame = fetch_gains.get()
        wait = wait | by_rank(frame[frame["left"] == 0], "gain_ns")
    try:
        takes = by_rank(loader_means.get().dropna(subset="taken_ns"), "taken_ns")
    except NotMeasured:
        takes = {}
    taken = {r: min(takes.get(r, 0.0), ns) for r, ns in wait.items()}
    rows = [(r, ns - taken[r], taken[r]) for r, ns in wait.items()]
    return pd.DataFrame(rows, columns=["rank", "wait_ns", "taken_ns"])


def _no_loader(before_forward: tuple[int, float] | None, mean_step_ns: Maybe[float]) -> str:
    if before_forward is None:
        return "no DataLoader was seen; data that comes in another way shows as the host's time"
    rank, ns = before_forward
    return (
        f"no DataLoader was seen; {duration(ns)} of each step ({percent(ns / mean_step_ns.get())}) pass on rank {rank}"
        " before the first forward, in no loader that dlprof knows: if data comes in there, it shows as the host's time"
    )


@across_ranks
def input_cost_ns(
    input_waits: pd.DataFrame,
    step_series: pd.DataFrame,
    own_time: pd.DataFrame,
    breakdown: pd.DataFrame,
    job: Job,
) -> float:
    """Return what the job would gain without any wait for data, ns of the mean steady step."""
    gone = by_rank(input_waits, "wait_ns")
    most = room(breakdown, ("input_wait",) if settings.on_cpu(job) else SAVES_FROM)
    return min(saving_input(step_series, own_time, gone), most)


@dataclass(frozen=True)
class FasterLoader:
    """What takes the wait away and what that saves, ns a step: more workers, or cheaper batches where they do not help.

    `saving_ns`: of the better of the two. `plan`: None where the batches were not recorded. `workers_help`: whether it
    is the plan's workers. `part`: what of making a batch takes longer, SAMPLES or COLLATING.
    """

    saving_ns: float
    plan: Plan | None = None
    workers_help: bool = False
    part: str = SAMPLES


@across_ranks
def faster_loader(
    input_waits: pd.DataFrame,
    input_cost_ns: float,
    mean_step_ns: float,
    paces: Maybe[Paces],
    own_time: pd.DataFrame,
    step_series: pd.DataFrame,
    fetch_gains: Maybe[pd.DataFrame],
    job: Job,
) -> FasterLoader:
    """Predict what the better of more workers and cheaper batches saves; the whole wait where that is not known.

    It is the wait that must be worth a change: a prediction takes long, and is made only where it is.
    """
    wait, recorded = by_rank(input_waits, "wait_ns"), paces.or_none()
    if input_cost_ns < NOTABLE_SHARE * mean_step_ns or recorded is None:
        return FasterLoader(input_cost_ns)
    rank = max(wait, key=lambda rank: wait[rank])
    plan = planned(recorded, own_time, fetch_gains, wait, rank)
    if plan is None:
        return FasterLoader(input_cost_ns)
    costly = recorded.of(rank).costly
    cheaper = _gain_of_cheaper(recorded, mean_step_ns, own_time, step_series, fetch_gains, job, wait, rank, costly)
    gain = max(cheaper, plan.gain_ns)
    helps = plan.gain_ns >= max(NOTABLE_SHARE * mean_step_ns, LARGER_PART * gain)
    return FasterLoader(plan.gain_ns if helps else gain, plan, helps, costly)


def _gain_of_cheaper(
    paces: Paces,
    mean_step_ns: float,
    own_time: pd.DataFrame,
    step_series: pd.DataFrame,
    fetch_gains: Maybe[pd.DataFrame],
    job: Job,
    wait: Mapping[int, float],
    rank: int,
    costly: str,
) -> float:
    """Return what the run gains where a part of making batches costs nothing, ns.

    On a GPU's host it is waiting alone: what the host computes beside a busy GPU costs no time. So it is where not all
    ranks' batches were recorded: they are taken to be like this rank's.
    """
    if settings.on_cpu(job):
        with suppress(NotMeasured):
            return mean_step_ns - step_with_cheaper(paces, own_time, costly)
    freed = freed_by_cheaper(paces, rank, costly)
    return saving_input(step_series, own_time, {r: gained(fetch_gains, r, ns, freed) for r, ns in wait.items()})
