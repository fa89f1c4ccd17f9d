"""One loader worker is slower than the others, and the queue waits for it.

Batches are taken in order, and each n-th is the same worker's: a worker that is slow holds up every n-th batch, however
many the others have ready. What makes it slow may be its shard of the data, the storage that it reads from, or the core
that it shares.

Needs the batches that dlprof records beside the light layer, and at least two workers.

Saving: the wait that is gone when the slow worker fetches as the others do: the recorded batches are replayed, in
order, with its fetches and with theirs in their place.

What to change: give every worker the same work (shards of one size, on the same storage, shuffled before they are
shared out); for an iterable data set, share out samples instead of files; do not bind a worker to the core on which
training runs. `in_order=False` (torch 2.6 or later) takes whichever batch is ready, in another order at each run.
"""

from __future__ import annotations

from statistics import median

import pandas as pd

from dlprof.diagnosis import Clear, Rule
from dlprof.engine import Measured
from dlprof.errors import NotMeasured
from dlprof.measures.breakdown import breakdown, part, part_noise
from dlprof.measures.loader import fetch_series, loader_means, worker_means
from dlprof.measures.replay import own_time, saving_input
from dlprof.measures.workers import freed_by_equal_workers
from dlprof.result import Finding, Panel
from dlprof.timeline.steps import mean_step_ns, step_means, step_series
from dlprof.units import duration, percent

# A worker is slow where the others take less than this share of its time: the score under which NVIDIA's resiliency
# extension calls a rank a straggler.
SCORE = 0.75

MOST_BARS = 60


def check(run: Measured) -> Finding | Clear:
    """Look for a rank with a worker that takes longer than the others, and at what the job would gain without it."""
    workers = run.frame(worker_means)
    slow: dict[int, int] = {}
    several = False
    for rank in run.ranks:
        takes = _takes(workers, rank)
        several = several or len(takes) > 1
        worst = max(takes, key=lambda w: takes[w], default=-1)
        if len(takes) > 1 and _others(takes, worst) < SCORE * takes[worst]:
            slow[rank] = worst
    if not several:
        raise NotMeasured("no loader has two workers or more")
    if not slow:
        return Clear("the workers of each loader take about as long as each other for a batch")
    wait = part(run, "input_wait")
    gain = saving_input(run, {r: wait.get(r, 0.0) * freed_by_equal_workers(run, r, w) for r, w in slow.items()})
    rank = max(slow, key=lambda r: wait.get(r, 0.0))
    takes, worst = _takes(workers, rank), slow[rank]
    rows = tuple((f"worker {w}", ns, "input_wait") for w, ns in list(takes.items())[:MOST_BARS])
    return Finding(
        title=f"Loader worker {worst} is slower than the others",
        summary=f"Worker {worst} of rank {rank} takes {duration(takes[worst])} for a batch, the others"
        f" {duration(_others(takes, worst))}; every {len(takes)} batches the loop waits for it.",
        verdict=f"{percent(gain / mean_step_ns(run))} of each step waits for one slow loader worker.",
        noise_ns=part_noise(run, "input_wait"),
        saving_ns=gain,
        advice=(
            f"give worker {worst} what the others have: shards of one size, the same storage, no core of its own",
            "`in_order=False` takes whichever batch is ready (torch 2.6 or later; the order then varies)",
        ),
        evidence=Panel("bars", f"Fetching a batch, by worker of rank {rank}", rows, unit="ns"),
        ranks=tuple(sorted(slow)),
        sure="Predicted by replaying the recorded batches, the other workers' fetches in the place of the slow one's.",
    )


def _takes(workers: pd.DataFrame, rank: int) -> dict[int, float]:
    mine = workers[(workers["rank"] == rank) & (workers["worker"] >= 0)]
    return {int(w): float(ns) for w, ns in zip(mine["worker"], mine["dur_ns"], strict=True)}


def _others(takes: dict[int, float], worker: int) -> float:
    return median(ns for w, ns in takes.items() if w != worker)


RULE = Rule(
    "slow_worker_batches",
    "One slow loader worker",
    (breakdown, fetch_series, loader_means, own_time, step_means, step_series, worker_means),
    check,
    saves_from=("input_wait",),
    feeds=True,
)
