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

from dlprof.diagnosis import LEAST_NOISE, LEAST_SHARE, Rule
from dlprof.engine import Measured
from dlprof.estimate import Estimate, Explanation, change, worst
from dlprof.measures.breakdown import breakdown, part, part_noise
from dlprof.measures.replay import own_time, saving_stalls
from dlprof.measures.room import room
from dlprof.measures.stalls import stall_means, stalled_steps
from dlprof.panels.steps import stall_bars
from dlprof.result import Change
from dlprof.timeline.steps import mean_step_ns, step_means
from dlprof.units import digits, duration, percent

# What saving less often is to bring checkpoints down to: where nothing would be said of them.
GOAL_SHARE = LEAST_SHARE

_KIND = "checkpoint"


def check(run: Measured) -> Estimate:
    """Estimate what saving takes of each rank's steps, and what the job would gain without it."""
    means = run.frame(stall_means)
    means = means[means["kind"] == _KIND]
    saved = part(run, _KIND)
    step = mean_step_ns(run)
    stalls = min(saving_stalls(run, _KIND, saved), room(run, (_KIND,)))
    mine = means.set_index("rank").to_dict("index")[worst(saved)]
    beside, noise = float(mine["beside_ns"]), float(mine["beside_noise_ns"])
    if not beside > LEAST_NOISE * noise:
        beside = noise = 0.0
    return Estimate(
        saving_ns=stalls + beside,
        by_rank_ns=saved,
        noise_ns=math.hypot(part_noise(run, _KIND), noise),
        within={_KIND: stalls},
        # What is seen beside the stalls is less sure: they must be worth a word without it.
        notable=LEAST_SHARE + beside / step,
        loses="waits for checkpoints",
        summary="" if means["stalls"].sum() else "no steady step saved a checkpoint",
        explain=lambda: _explain(run, saved, float(mine["mean_ns"]), float(mine["every"]), stalls, beside),
    )


def _explain(
    run: Measured, saved: Mapping[int, float], mean: float, every: float, stalls: float, beside: float
) -> Explanation:
    rank = worst(saved)
    steps = run.frame(stalled_steps)
    steps = steps[(steps["rank"] == rank) & (steps["kind"] == _KIND)]
    besides = f"; such a step takes {duration(beside * every)} longer beside that" if beside else ""
    waiting = any(saved.get(r, 0.0) < saved[rank] / 2 for r in run.ranks)
    return Explanation(
        title="Saving checkpoints holds up training",
        summary=f"Rank {rank} saves in one steady step of {digits(every)} and stands still for"
        f" {duration(mean * every)} then{_where(steps)}{besides}.",
        changes=_changes(every, (stalls + beside) / mean_step_ns(run)),
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
    (breakdown, own_time, stall_means, stalled_steps, step_means),
    check,
    # Gathering the state, or replacing a file, is the host's.
    saves_from=("checkpoint", "host", "other"),
)
