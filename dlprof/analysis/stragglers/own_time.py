"""Each rank's own time, step by step: the step less the rank's waiting for others.

There is one estimate a run, `own_steps`, from one of three sources:

* BUSY, on a CPU where one thread of each rank computes. The thread stands still only to wait and in collectives. All
  ranks exchange the same data, so a rank with longer communication in the mean steady step waits for the difference.
  All steady steps show the spread.
* TRACED, on a device, and where nothing else was recorded: the waiting of the traced steps. The mean is that of
  `step.savings.own_time`, which also uses the other steps.
* LOGGED, on a CPU with several threads a rank: every step of the step log. In the phases in which the trace shows ranks
  waiting (DDP's backward pass), all ranks are assumed to do the same work. So it misses a rank that has more work only
  there: if the traced steps show a late rank for sure and the step log none, the traced steps are the source.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from msgspec import Struct
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis import settings
from dlprof.analysis.communication.collectives import waiting, waits
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, across_ranks, maybe, needs, per_rank
from dlprof.analysis.step.breakdown import alone_usage, breakdown, part, steady_usage
from dlprof.analysis.step.partition import host_phases
from dlprof.analysis.step.savings import LEAST_NOISE, own_time
from dlprof.analysis.timeline.steady import standard_error
from dlprof.analysis.timeline.steps import PHASES, step_series
from dlprof.errors import NotMeasured

# Ranks wait in a phase where at least this share of all their waiting falls into it.
WAITING_PHASE = 0.1

# Disturbances last: steps in a row are alike. Means of this many (the steps of a window) are nearly independent.
BLOCK = 5

# The most rows of a rank's use of its cores that it passes on: a few kilobytes.
MOST_ROWS = 400

# A few traced steps in a row count from here on where they alone show a late rank. The slowest is looked at: of two
# alike, one is twice the noise ahead in one window of twenty, and three times in one of seventy.
SURE_NOISE = 3.0

# Notable from 5 % of a step on; other tools grade 5, 10 and 20 %.
NOTABLE_SHARE = 0.05

BUSY, TRACED, LOGGED = "busy", "traced", "logged"


@per_rank
def phases(host_phases: dict[str, iv.Intervals] = needs(host_phases)) -> pd.DataFrame:
    """Return when the training thread was in which phase of the steady traced steps: phase, start_ns, end_ns."""
    found = np.concatenate(list(host_phases.values()))
    names = np.repeat(list(host_phases), [len(during) for during in host_phases.values()])
    return pd.DataFrame({"phase": names, "start_ns": found[:, 0], "end_ns": found[:, 1]})


@across_ranks
def who_waits(waits: Frame = needs(waits), breakdown: Frame = needs(breakdown)) -> pd.DataFrame:
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


@per_rank
def busy(
    steady_usage: Frame = needs(steady_usage),
    alone_usage: Maybe[Frame] = maybe(alone_usage),
    steps: Frame = needs(schema.STEPS),
) -> pd.DataFrame:
    """Return how long a rank was busy in the steady steps: step, time_ns, cpu_ns (of its process), busy_ns, alone.

    `alone`: its training thread computes alone; busy_ns is then the time in which that ran, or was ready to run and had
    no core. With several threads it is the CPU time of all, and the latter. A rank that waits for another sleeps, with
    gloo. Thinned. Raises NotMeasured where the kernel did not count it.
    """
    alone = alone_usage.or_none()
    used = steady_usage if alone is None else alone
    if not len(used):
        raise NotMeasured("what the ranks use of their cores was not recorded")
    ran = used["cpu_ns" if alone is None else "thread_ns"]
    used = used.assign(time_ns=used["dur_ns"], busy_ns=ran + used["delay_ns"])
    sums = used.groupby(used["step"] // -(-len(steps) // MOST_ROWS))[["time_ns", "cpu_ns", "busy_ns"]].sum()
    return sums.reset_index().assign(alone=alone is not None)


@across_ranks
def own_steps(
    waits: Frame = needs(waits),
    own_time: Frame = needs(own_time),
    breakdown: Frame = needs(breakdown),
    busy: Maybe[Frame] = maybe(busy),
    step_series: Maybe[Frame] = maybe(step_series),
    waiting: Maybe[dict[int, iv.Intervals]] = maybe(waiting),
    phases: Maybe[Frame] = maybe(phases),
    job: Job = needs(JOB),
) -> pd.DataFrame:
    """Return each rank's own time in each step, or mean of some steps: step, rank, own_ns, source (as above).

    Raises NotMeasured as `waits` does, and where no step was traced on every rank.
    """
    traced = _traced(waits)
    used = _busy_share(busy, job) if settings.on_cpu(job) else None
    if used is not None and busy.get()["alone"].all():
        exchanges = pd.Series(part(breakdown, "communication"))
        step = float(own_time["step_ns"].mean())
        return _rows(_at_means(used * step, step - (exchanges - exchanges.min())), BUSY)
    logged = _logged(step_series.get(), waiting.get(), phases.get()) if settings.on_cpu(job) and step_series else None
    if logged is None:
        # A stage that waits for its neighbours is not late for that: its bubble counts as waiting.
        mean = own_time.set_index("rank")
        means = mean["step_ns"] - mean["wait_ns"]
        # The further apart the ranks are, the more their steps differ.
        apart = float(np.ptp(means) / (np.ptp(traced.mean()) or np.inf))
        return _rows(_at_means(traced * apart, means), TRACED)
    return _rows(traced, TRACED) if _alone_shows(traced, logged, used) else _rows(logged, LOGGED)


def _alone_shows(traced: pd.DataFrame, logged: pd.DataFrame, used: pd.DataFrame | None) -> bool:
    """Return whether only the traced steps show that a rank is late, and for sure.

    What one short window shows must exceed what such windows show by chance, and the profiler takes memory, which costs
    one rank more than another: who is late is busy for longer in all steps too, or may be.
    """
    in_trace, every = lead(traced), lead(logged)
    if every.saving_ns >= NOTABLE_SHARE * every.step_ns and every.behind_ns >= LEAST_NOISE * every.noise_ns:
        return False
    longer = lead(used, in_trace.ranks) if used is not None else None
    if longer and longer.behind_ns + LEAST_NOISE * longer.noise_ns < NOTABLE_SHARE:
        return False
    return in_trace.behind_ns >= SURE_NOISE * max(in_trace.noise_ns, every.window_noise_ns)


def _traced(waits: pd.DataFrame) -> pd.DataFrame:
    """Return the own time in each traced step: one row a step, one column a rank.

    Ranks that wait for each other have one step; that one's trace began earlier than another's makes no rank slower.
    """
    own = waits.groupby("step")["dur_ns"].transform("mean") - waits["wait_ns"]
    frame = _by_rank(waits.assign(own_ns=own), "own_ns")
    if frame.shape[1] < 2 or not len(frame):
        raise NotMeasured("no step was traced on every rank: the same trace window on all ranks is needed")
    return frame


def _logged(series: pd.DataFrame, waiting: dict[int, iv.Intervals], phases: pd.DataFrame) -> pd.DataFrame | None:
    """Return the own time in each steady step of the step log; None where ranks share no step of it.

    In the phases in which ranks wait all are taken to do the same work, so that what a rank spends there beyond the
    shortest is waiting.
    """
    series = series[series["steady"].astype(bool)]
    parts = series[[f"{p}_ns" for p in PHASES]]
    if not len(series) or (parts < 0).any(axis=None):
        return None
    series = series.assign(rest_ns=series["dur_ns"] - parts.sum(axis=1))
    step = _by_rank(series, "dur_ns")
    own = (step * 0.0).add(step.mean(axis=1), axis=0)
    for phase in _waiting_phases(waiting, phases):
        spent = _by_rank(series, f"{phase}_ns")
        own = own.sub(spent.sub(spent.min(axis=1), axis=0))
    own = own.dropna()
    return own if own.shape[1] > 1 and len(own) else None


def _busy_share(busy: Maybe[pd.DataFrame], job: Job) -> pd.DataFrame | None:
    """Return each rank's busy share of the time, by step and rank; None where it is not known, or says nothing.

    With several threads a rank may be busy for longer than the time. With any backend but gloo, one that waits is too.
    """
    gloo = all("gloo" in str(job.facts[r].get("backend") or job.trace_facts[r].get("backend")) for r in job.ranks)
    if not gloo or busy.lacking or not busy:
        return None
    frame = busy.get()
    shares = _by_rank(frame.assign(share=frame["busy_ns"] / frame["time_ns"].clip(lower=1)), "share")
    return shares if shares.shape[1] > 1 and len(shares) else None


def _at_means(series: pd.DataFrame, means: pd.Series[float]) -> pd.DataFrame:
    """Return the series with each rank's mean brought to that of its own time."""
    return series - series.mean() + means.reindex(series.columns)


def _rows(frame: pd.DataFrame, source: str) -> pd.DataFrame:
    """Return steps × ranks as the rows of `own_steps`."""
    rows = frame.rename_axis(index="step").reset_index().melt("step", var_name="rank", value_name="own_ns")
    return rows.astype({"rank": "int64"}).assign(source=source)


def _by_rank(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return a column of rows by step and rank, of steps that all ranks have."""
    return frame.pivot_table(index="step", columns="rank", values=column).dropna()


def steps_of(own_steps: pd.DataFrame) -> pd.DataFrame:
    """Return own times as `lead` takes them: one row a step, one column a rank."""
    return _by_rank(own_steps, "own_ns")


def _waiting_phases(waiting: dict[int, iv.Intervals], phases: pd.DataFrame) -> list[str]:
    """List the phases into which the ranks' waiting falls, as the traced steps show it."""
    total: dict[str, int] = {}
    for (rank, phase), group in phases.groupby(["rank", "phase"]):
        during = iv.union(group["start_ns"].to_numpy(), group["end_ns"].to_numpy())
        total[str(phase)] = total.get(str(phase), 0) + iv.total(iv.intersect(waiting[int(str(rank))], during))
    return [p for p, ns in total.items() if ns and ns >= WAITING_PHASE * sum(total.values())]


class Lead(Struct, frozen=True):
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
