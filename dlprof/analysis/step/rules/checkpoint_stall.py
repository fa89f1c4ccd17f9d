"""Training stands still while a checkpoint is saved.

`torch.save` and `torch.distributed.checkpoint.save` return when all is written. Until then the training thread does
nothing else, its device soon has nothing left to do, and the other ranks wait at their next collective.

Needs the stalls that dlprof records with the step log: what the training thread spent in `torch.save` (and in renaming
its file, which frees the one that it replaces), `torch.distributed.checkpoint.save` and `async_save` in every steady
step. On a GPU also a trace: saves count up to the step's time without device work. Checkpoints that another thread
saves, or other libraries without these functions, are not seen.

Where no steady step saves, as where a job saves between its epochs, all saves of the job count, spread over its
training steps; their share is that of the training loop.

Saving: the stalls gone altogether, which saving in the background comes near to, and what the steps that save take
longer besides, as to gather the state: by how much they, and the steps after them, are longer than the others. Where a
job saves so often that the system never stops writing to its disk, that slows all steps alike on a busy host, and none
of them shows by how much: then more is gained than is predicted.

What to change: where what is saved are parts of larger tensors, which `torch.save` writes whole, clone the parts; where
what is saved is compressed on the way, as by `gzip.open`, write it as it is: weights hardly
compress. Save in the background (`torch.distributed.checkpoint.async_save` returns once the state is copied); let
each rank write its own part; write to a local disk first. If the training may change: save less often (what a failure
costs is half the interval, on average).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd

from dlprof.analysis.engine import JOB, Frame, Job, Maybe, maybe, needs
from dlprof.analysis.estimate import LEAST_SHARE, Estimate, Explanation, Rule, change, worst
from dlprof.analysis.idioms import BY_NAME
from dlprof.analysis.panels.step import stall_bars
from dlprof.analysis.source.line_shares import costliest, costly_lines
from dlprof.analysis.source.statements import Trees, statements, telling
from dlprof.analysis.step.breakdown import breakdown, most_saved_ns, part, part_noise
from dlprof.analysis.step.savings import LEAST_NOISE, stall_savings
from dlprof.analysis.step.whole_job import training_steps, whole_job
from dlprof.analysis.timeline.stalls import saved_bytes, stall_means, stalled_steps, stalls_of
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.result import Change
from dlprof.units import count, duration, every, percent, size, typed

# What saving less often is to bring checkpoints down to: below it they are no finding.
GOAL_SHARE = LEAST_SHARE

_KIND = "checkpoint"

# Who saves in a step of so few keeps the best state, or the last one: a copy in memory does as well, and costs little.
_OFTEN = 4
# `torch.save` writes all of the storage that a tensor is a part of: so much is none of that part, of so many bytes.
_MOSTLY, _LARGE = 0.5, 1 << 20
_CLONE = (
    "clone what is saved (`part.clone()`), where it is a part of a larger tensor: `torch.save` writes all of the"
    " storage that it is a part of"
)
_RARELY = (
    change(
        "keep a copy of the state in memory (`copy.deepcopy(model.state_dict())`, the optimizer's likewise), and write"
        " that copy every few minutes and at the end, not in every step that is the best so far"
    ),
)


# Where a library saves, as the script has told it.
_ARGUMENTS = change(
    "have one file written for each save, without what no later run needs of it: of Lightning"
    " `ModelCheckpoint(save_weights_only=True, save_last='link')`, of transformers `save_only_model=True`"
)


def check(
    stall_means: Frame = needs(stall_means),
    breakdown: Frame = needs(breakdown),
    mean_step_ns: float = needs(mean_step_ns),
    stall_savings: Mapping[str, float] = needs(stall_savings),
    whole_job: Maybe[Frame] = maybe(whole_job),
    training_steps: Maybe[pd.Series[float]] = maybe(training_steps),
) -> Estimate:
    saved = part(breakdown, _KIND)
    stalls = min(stall_savings[_KIND], most_saved_ns(breakdown, (_KIND,)))
    longer, noise = stalls_of(stall_means, _KIND, worst(saved))[["longer_ns", "longer_noise_ns"]].iloc[0].astype(float)
    if not longer > LEAST_NOISE * noise:
        longer = noise = 0.0
    # What else varies between the steps, as how long a collection of garbage takes, is no cost of saving.
    longer = min(longer, max(most_saved_ns(breakdown, RULE.saves_from) - stalls, 0.0))
    recorded = stall_means["stalls"][stall_means["kind"] == _KIND].any()
    parts = whole_job.or_none()
    if not recorded and parts is not None and (parts["part"] == _KIND).any():
        outside = parts[parts["part"] == _KIND]
        spread = outside.set_index("rank")["ns"].div(training_steps.get()).dropna()
        each = {int(str(rank)): float(ns) for rank, ns in spread.items()}
        return Estimate(
            saving_ns=max(each.values()),
            by_rank_ns=each,
            scope="job",
            loses="waits for checkpoints between the steady steps",
            seen=outside,
        )
    return Estimate(
        saving_ns=stalls + longer,
        by_rank_ns=saved,
        noise_ns=math.hypot(part_noise(breakdown, _KIND), noise),
        within={_KIND: stalls},
        # What such steps take longer besides is less sure: the stalls must be notable without it.
        notable=LEAST_SHARE + longer / mean_step_ns,
        loses="waits for checkpoints",
        summary="" if recorded else "no steady step saved a checkpoint",
        seen=longer,
    )


def explain(
    estimate: Estimate,
    stall_means: Frame = needs(stall_means),
    stalled_steps: Frame = needs(stalled_steps),
    mean_step_ns: float = needs(mean_step_ns),
    costly_lines: Maybe[Frame] = maybe(costly_lines),
    saved_bytes: Maybe[Frame] = maybe(saved_bytes),
    statements: Trees = needs(statements),
    job: Job = needs(JOB),
) -> Explanation:
    rank, by_rank = estimate.worst, estimate.by_rank_ns
    parts, needless = _parts(saved_bytes.or_none(), rank)
    told = telling(statements, BY_NAME["saved"].at)
    less = (*needless, *_compressing(costly_lines, rank), *((_ARGUMENTS,) if told else ()))
    if estimate.scope == "job":
        return _outside(estimate, parts, less)
    (mine,) = stalls_of(stall_means, _KIND, rank).to_dict("records")
    apart, share, steps = float(mine["every"]), estimate.saving_ns / mean_step_ns, stalls_of(stalled_steps, _KIND, rank)
    path = str(steps.nlargest(1, "ns")["path"].iloc[0]) if len(steps) else ""  # "" is a buffer in memory
    longer = f"; such a step takes {duration(estimate.seen * apart)} longer besides" if estimate.seen else ""
    # What is left of a step without its checkpoints is 1 − share; n × rarer leaves share ÷ n.
    rarer = math.ceil(share * (1 - GOAL_SHARE) / ((1 - share) * GOAL_SHARE)) if share < 1 else 1000
    waiting = any(by_rank.get(r, 0.0) < by_rank[rank] / 2 for r in job.ranks)
    return Explanation(
        title="Saving checkpoints holds up training",
        summary=f"Rank {rank} saves in {every(apart, 'steady step')} and stands still for"
        f" {duration(float(mine['mean_ns']) * apart)} then{f' ({path[-80:]})' if path else ''}{longer}.{parts}",
        changes=(
            *less,
            *(_RARELY if apart <= _OFTEN and not told else ()),
            change("`torch.distributed.checkpoint.async_save`: training goes on while the state is written"),
            change(
                f"save every {typed(apart * max(2, rarer)):,} steps (now {every(apart, 'one')}): at most"
                f" {percent(GOAL_SHARE)} of the time then goes to saving",
                training=True,
            ),
        ),
        at_most=True,
        where=told,
        evidence=stall_bars(steps, rank, "Saving"),
        sure="Measured in every steady step, estimated as all of it gone; saving in the background still copies the"
        " state." + (" That the other ranks wait for those that save is assumed." if waiting else ""),
    )


def _compressing(lines: Maybe[pd.DataFrame], rank: int) -> tuple[Change, ...]:
    """Return the change of a line that compresses what it saves, where one was seen."""
    frame = lines.or_none()
    if frame is None:
        return ()
    mine = frame[(frame["rank"] == rank) & (frame["doing"] == "rest") & (frame["idiom"] == "saved_compressed")]
    line = costliest(lines, rank, "rest") if len(mine) else None
    return (change(line.advice()),) if line and line.idiom and line.idiom.name == "saved_compressed" else ()


def _parts(saved: pd.DataFrame | None, rank: int) -> tuple[str, tuple[Change, ...]]:
    """Return what is said of a job that saves parts of larger tensors, and its change."""
    mine = [] if saved is None else saved[saved["rank"] == rank].to_dict("records")
    if not mine or mine[0]["storage_bytes"] < max(_LARGE, mine[0]["values_bytes"] / (1 - _MOSTLY)):
        return "", ()
    values, storage = size(mine[0]["values_bytes"]), size(mine[0]["storage_bytes"])
    return f" The tensors have {values}; the storages that they are parts of, {storage}, are written.", (
        change(_CLONE),
    )


def _outside(estimate: Estimate, parts: str, less: tuple[Change, ...]) -> Explanation:
    mine = estimate.rows(estimate.seen).iloc[0]
    saves, ns = int(mine["steps"]), float(mine["ns"])
    return Explanation(
        title="Saving checkpoints holds up training",
        summary=f"Rank {estimate.worst} saved {count(saves, 'time')}, between its steady steps, and stood still for"
        f" {duration(ns / max(saves, 1))} each time.{parts}",
        changes=(
            *less,
            change("`torch.distributed.checkpoint.async_save`: training goes on while the state is written"),
            change("save less often, or less: what one failure may cost is half the interval", training=True),
        ),
        at_most=True,
        sure="Measured over the whole job, estimated as all of it gone; saving in the background still copies the"
        " state. A job that saves less often than the recorded part of it has less to gain.",
    )


# Gathering the state, or replacing a file, is the host's.
RULE = Rule("Saving checkpoints", check, explain, saves_from=(_KIND, "host", "other"))
