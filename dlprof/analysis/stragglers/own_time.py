"""Each rank's own time, step by step: the step less the rank's waiting for others.

From the trace it is exact, for a handful of steps in a row: on a busy machine those may be unlike all others. On a CPU
run the step log shows it for every step, with one assumption: in the phases in which the trace shows ranks waiting, all
do the same work, so that what a rank spends there beyond the shortest is waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import intervals as iv
from dlprof.analysis import settings
from dlprof.analysis.engine import Job, Maybe, across_ranks, per_rank
from dlprof.analysis.step.breakdown import part
from dlprof.analysis.timeline.steady import standard_error
from dlprof.analysis.timeline.steps import PHASES
from dlprof.errors import NotMeasured

# Ranks wait in a phase where at least this share of all their waiting falls into it.
WAITING_PHASE = 0.1

# Disturbances last: steps in a row are alike. Means of this many (as many as a window traces) are nearly independent.
BLOCK = 5

# What travels of the ranks' use of their cores: a few kilobytes.
MOST_ROWS = 400


@per_rank
def phases(host_phases: dict[str, iv.Intervals]) -> pd.DataFrame:
    """Return when the training thread was in which phase of the steady traced steps: phase, start_ns, end_ns."""
    found = np.concatenate(list(host_phases.values()))
    names = np.repeat(list(host_phases), [len(during) for during in host_phases.values()])
    return pd.DataFrame({"phase": names, "start_ns": found[:, 0], "end_ns": found[:, 1]})


@across_ranks
def traced_own_time(waits: pd.DataFrame) -> pd.DataFrame:
    """Return each rank's own time in each traced step, ns: one row a step, one column a rank.

    Ranks that wait for each other have one step; that one's trace began earlier than another's makes no rank slower.
    Where the step log shows how unusual the step was for a rank, that is taken off (a control variate), if it makes the
    difference between the ranks surer. Raises NotMeasured as `waits` does.
    """
    own = waits.groupby("step")["dur_ns"].transform("mean") - waits["wait_ns"]
    plain = _by_rank(waits.assign(own_ns=own), "own_ns")
    usual = _by_rank(waits.assign(own_ns=own - waits["loose_ns"]), "own_ns")
    if plain.shape[1] < 2 or not len(plain):
        raise NotMeasured("no step was traced on every rank: the same trace window on all ranks is needed")
    surer = len(usual) == len(plain) and lead(usual).noise_ns < lead(plain).noise_ns
    return usual if surer else plain


@across_ranks
def who_waits(waits: pd.DataFrame, breakdown: pd.DataFrame) -> pd.DataFrame:
    """Return a row a rank, the slowest first: its traced steps' mean own_ns and wait_ns, and their collectives.

    Columns: rank, own_ns, wait_ns, last (how many of the matched collectives it came to last), matched, and of the mean
    steady step computation_ns and input_wait_ns.
    """
    own = waits.groupby("step")["dur_ns"].transform("mean") - waits["wait_ns"]
    by = {"own_ns": ("own_ns", "mean"), "wait_ns": ("wait_ns", "mean"), "last": ("last", "sum")}
    ranks = waits.assign(own_ns=own).groupby("rank").agg(**by, matched=("matched", "sum"))
    ranks = ranks.sort_values("own_ns", ascending=False).reset_index()
    for category in ("computation", "input_wait"):
        ranks[f"{category}_ns"] = ranks["rank"].map(part(breakdown, category)).fillna(0.0)
    return ranks


@across_ranks
def light_own_time(
    step_series: Maybe[pd.DataFrame], waiting: Maybe[dict[int, iv.Intervals]], phases: Maybe[pd.DataFrame], job: Job
) -> pd.DataFrame:
    """Return each rank's own time in each steady step of a CPU run, ns: one row a step, one column a rank.

    Raises NotMeasured where the step log is not there or shares no step, or the device runs on while the host waits.
    """
    if not settings.on_cpu(job):
        raise NotMeasured("the host's phases do not tell what a device waits for")
    series = step_series.get()
    series = series[series["steady"].astype(bool)]
    parts = series[[f"{p}_ns" for p in PHASES]]
    if not len(series) or (parts < 0).any(axis=None):
        raise NotMeasured("the step log's phases were not recorded on every rank")
    series = series.assign(rest_ns=series["dur_ns"] - parts.sum(axis=1))
    step = _by_rank(series, "dur_ns")
    own = (step * 0.0).add(step.mean(axis=1), axis=0)
    for phase in _waiting_phases(waiting.get(), phases.get()):
        spent = _by_rank(series, f"{phase}_ns")
        own = own.sub(spent.sub(spent.min(axis=1), axis=0))
    own = own.dropna()
    if own.shape[1] < 2 or not len(own):
        raise NotMeasured("no steady step was recorded on every rank")
    return own


@per_rank
def busy(steady_usage: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Return what a rank's process used of its cores in the steady steps: step, time_ns, cpu_ns, busy_ns; thinned.

    busy_ns is CPU time (cpu_ns) and the time in which the training thread was ready to run and had no core. A rank that
    waits for another sleeps, with gloo. Raises NotMeasured where the kernel did not count it.
    """
    if not len(steady_usage):
        raise NotMeasured("what the ranks use of their cores was not recorded")
    used = steady_usage.rename(columns={"dur_ns": "time_ns"})
    used = used.assign(busy_ns=used["cpu_ns"] + used["delay_ns"])
    sums: pd.DataFrame = used.groupby(used["step"] // -(-len(steps) // MOST_ROWS))[
        ["time_ns", "cpu_ns", "busy_ns"]
    ].sum()
    return sums.reset_index()


@across_ranks
def busy_share(busy: Maybe[pd.DataFrame], job: Job) -> pd.DataFrame:
    """Return each rank's busy share of the time: one row some steps, one column a rank.

    With several threads a rank may be busy for longer than the time. Raises NotMeasured as `busy`, and where ranks that
    wait are busy.
    """
    gloo = all("gloo" in str(job.facts[r].get("backend") or job.trace_facts[r].get("backend")) for r in job.ranks)
    if not settings.on_cpu(job) or not gloo or busy.lacking:
        raise NotMeasured("what a rank is busy does not tell its own time")
    frame = busy.get()
    return _by_rank(frame.assign(share=frame["busy_ns"] / frame["time_ns"].clip(lower=1)), "share")


def _by_rank(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return a column of rows by step and rank, of steps that all ranks have."""
    return frame.pivot_table(index="step", columns="rank", values=column).dropna()


def _waiting_phases(waiting: dict[int, iv.Intervals], phases: pd.DataFrame) -> list[str]:
    """List the phases into which the ranks' waiting falls, as the traced steps show it."""
    total: dict[str, int] = {}
    for (rank, phase), group in phases.groupby(["rank", "phase"]):
        during = iv.union(group["start_ns"].to_numpy(), group["end_ns"].to_numpy())
        total[str(phase)] = total.get(str(phase), 0) + iv.total(iv.intersect(waiting[int(str(rank))], during))
    return [p for p, ns in total.items() if ns and ns >= WAITING_PHASE * sum(total.values())]


@dataclass(frozen=True)
class Lead:
    """By how much the late ranks' own time exceeds the next one's, and what that costs; times in ns."""

    ranks: tuple[int, ...]  # the slowest first
    behind_ns: float
    least_ns: float  # in any step: how far they are behind at least, 0 where they are not
    noise_ns: float  # standard error of behind_ns
    window_noise_ns: float  # how far the mean of a few steps in a row is off, on this machine; 0: not known
    saving_ns: float
    shared_ns: float  # the same where all ranks share their work evenly
    step_ns: float


def lead(own: pd.DataFrame, late: Sequence[int] = ()) -> Lead:
    """Find the slowest rank in a frame of own times (steps × ranks, at least one by two), and replay it without.

    With `late`, some of the ranks, find by how much the fastest of them is behind the slowest of all others. Late ranks
    brought to the others' pace keep their jitter: every step is replayed, not the mean one. So do all ranks where their
    work is shared out.
    """
    mean = own.mean().sort_values(ascending=False, kind="stable")
    ranks = tuple(int(str(r)) for r in mean.index if r in late) or (int(str(mean.index[0])),)
    others = own.drop(columns=list(ranks))
    # Signed: a rank that is late by chance in some steps is early by chance in others.
    behind: NDArray[np.float64] = (own[ranks[-1]] - own[others.mean().idxmax()]).to_numpy(dtype=float)
    blocks = behind[: len(behind) // BLOCK * BLOCK].reshape(-1, BLOCK).mean(axis=1)
    many = len(blocks) >= BLOCK
    slowest, last = own[list(ranks)].max(axis=1), own.max(axis=1)
    without = np.maximum(others.max(axis=1), slowest - max(float(behind.mean()), 0.0))
    shared = own - mean + float(mean.mean())
    return Lead(
        ranks=ranks,
        behind_ns=float(behind.mean()),
        least_ns=max(float(behind.min()), 0.0) if len(behind) > 1 else 0.0,
        noise_ns=standard_error(blocks if many else behind),
        window_noise_ns=float(blocks.std(ddof=1)) if many else 0.0,
        saving_ns=float((last - without).mean()),
        shared_ns=float((last - shared.max(axis=1)).mean()),
        step_ns=float(last.mean()),
    )
