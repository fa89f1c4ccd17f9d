"""Training stands still while a checkpoint is saved.

`torch.save` and `torch.distributed.checkpoint.save` come back when all is written. Until then the training thread does
nothing else, its device soon has nothing left to do, and the other ranks wait at their next collective.

Needs the stalls that dlprof records beside the light layer: what the training thread spent in `torch.save`,
`torch.distributed.checkpoint.save` and `async_save` in every steady step. On a GPU also a trace: a save counts as far
as device work leaves room for it. Checkpoints that another thread saves, or other libraries without these functions,
are not seen.

Saving: the stalls gone altogether, which saving in the background comes near to, and what the steps that save take
longer beside them, as to gather the state or to replace a file: by how much they, and the steps after them, are longer
than the others. Where a job saves so often that the system never stops writing to its disk, that slows all steps alike
on a busy host, and none of them tells by how much: then more is gained than is predicted.

What to change: save less often (what a failure costs is half the interval, on average); save in the background
(`torch.distributed.checkpoint.async_save` returns once the state is copied); let each rank write its own part; write to
a local disk first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd

from dlprof.analysis.engine import Job
from dlprof.analysis.estimate import LEAST_SHARE, Estimate, Explanation, Rule, change, worst
from dlprof.analysis.step.breakdown import part, part_noise
from dlprof.analysis.step.headroom import room
from dlprof.analysis.step.panels.steps import stall_bars
from dlprof.analysis.step.savings import saving_stalls
from dlprof.analysis.step.spread import LEAST_NOISE
from dlprof.result import Change
from dlprof.units import digits, duration, percent

# What saving less often is to bring checkpoints down to: where nothing would be said of them.
GOAL_SHARE = LEAST_SHARE

_KIND = "checkpoint"


def check(
    stall_means: pd.DataFrame,
    breakdown: pd.DataFrame,
    mean_step_ns: float,
    stalled_steps: pd.DataFrame,
    own_time: pd.DataFrame,
    job: Job,
) -> Estimate:
    """Estimate what saving takes of each rank's steps, and what the job would gain without it."""
    means = stall_means
    means = means[means["kind"] == _KIND]
    saved = part(breakdown, _KIND)
    stalls = min(saving_stalls(stalled_steps, stall_means, own_time, _KIND, saved), room(breakdown, (_KIND,)))
    mine = means.set_index("rank").to_dict("index")[worst(saved)]
    beside, noise = float(mine["beside_ns"]), float(mine["beside_noise_ns"])
    if not beside > LEAST_NOISE * noise:
        beside = noise = 0.0
    return Estimate(
        saving_ns=stalls + beside,
        by_rank_ns=saved,
        noise_ns=math.hypot(part_noise(breakdown, _KIND), noise),
        within={_KIND: stalls},
        # What is seen beside the stalls is less sure: they must be worth a word without it.
        notable=LEAST_SHARE + beside / mean_step_ns,
        loses="waits for checkpoints",
        summary="" if means["stalls"].sum() else "no steady step saved a checkpoint",
        explain=lambda: _explain(
            stalled_steps, mean_step_ns, job, saved, float(mine["mean_ns"]), float(mine["every"]), stalls, beside
        ),
    )


def _explain(
    stalled_steps: pd.DataFrame,
    mean_step_ns: float,
    job: Job,
    saved: Mapping[int, float],
    mean: float,
    every: float,
    stalls: float,
    beside: float,
) -> Explanation:
    rank = worst(saved)
    steps = stalled_steps
    steps = steps[(steps["rank"] == rank) & (steps["kind"] == _KIND)]
    besides = f"; such a step takes {duration(beside * every)} longer beside that" if beside else ""
    waiting = any(saved.get(r, 0.0) < saved[rank] / 2 for r in job.ranks)
    return Explanation(
        title="Saving checkpoints holds up training",
        summary=f"Rank {rank} saves in one steady step of {digits(every)} and stands still for"
        f" {duration(mean * every)} then{_where(steps)}{besides}.",
        changes=_changes(every, (stalls + beside) / mean_step_ns),
        evidence=stall_bars(steps, rank, "Saving"),
        sure="Measured in every steady step, estimated as all of it gone; saving in the background still copies the"
        " state." + (" That the other ranks wait for those that save is assumed." if waiting else ""),
    )


def _where(steps: pd.DataFrame) -> str:
    # The longest names the place; "" is a buffer in memory.
    path = str(steps.nlargest(1, "ns")["path"].iloc[0]) if len(steps) else ""
    return f" ({path[-80:]})" if path else ""


def _changes(every: float, share: float) -> tuple[Change, ...]:
    # What is left of a step without its checkpoints is 1 − share; n × rarer leaves share ÷ n.
    rarer = math.ceil(share * (1 - GOAL_SHARE) / ((1 - share) * GOAL_SHARE)) if share < 1 else 1000
    often = max(2, rarer)
    return (
        change(
            f"save every {math.ceil(every * often):,} steps (now one in {digits(every)}): at most"
            f" {percent(GOAL_SHARE)} of the step is left of it"
        ),
        change("`torch.distributed.checkpoint.async_save`: training goes on while the state is written"),
    )


RULE = Rule(
    "checkpoint_stall",
    "Saving checkpoints",
    check,
    # Gathering the state, or replacing a file, is the host's.
    saves_from=("checkpoint", "host", "other"),
)
