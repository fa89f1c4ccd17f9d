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

from collections.abc import Mapping
from statistics import median

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.engine import Job, Maybe
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing, worst
from dlprof.analysis.input.paces import Paces
from dlprof.analysis.input.worker_plans import freed_by_equal_workers
from dlprof.analysis.step.breakdown import part, part_noise
from dlprof.analysis.step.savings import saving_input
from dlprof.errors import NotMeasured
from dlprof.result import Panel
from dlprof.units import duration

# A worker is slow where the others take less than this share of its time: the score under which NVIDIA's resiliency
# extension calls a rank a straggler.
SCORE = 0.75

MOST_BARS = 60


def check(
    worker_means: pd.DataFrame,
    breakdown: Maybe[pd.DataFrame],
    paces: Maybe[Paces],
    step_series: Maybe[pd.DataFrame],
    own_time: Maybe[pd.DataFrame],
    job: Job,
) -> Estimate:
    """Estimate what the job would gain if each rank's slow worker were as fast as the others."""
    by_rank = {rank: takes for rank in job.ranks if len(takes := _takes(worker_means, rank)) > 1}
    if not by_rank:
        raise NotMeasured("no loader has two workers or more")
    slowest = {rank: worst(takes) for rank, takes in by_rank.items()}
    slow = {r: w for r, w in slowest.items() if _others(by_rank[r], w) < SCORE * by_rank[r][w]}
    if not slow:
        return nothing("the workers of each loader take about as long as each other for a batch")
    wait = part(breakdown.get(), "input_wait")
    gone = {r: wait.get(r, 0.0) * freed_by_equal_workers(paces.get(), r, w) for r, w in slow.items()}
    rank = worst(gone)
    return Estimate(
        saving_ns=saving_input(step_series.get(), own_time.get(), gone),
        by_rank_ns=gone,
        noise_ns=part_noise(breakdown.get(), "input_wait"),
        loses="waits for one slow loader worker",
        explain=lambda: _explain(job, rank, slow[rank], by_rank[rank]),
    )


def _explain(job: Job, rank: int, slow: int, takes: Mapping[int, float]) -> Explanation:
    rows = tuple((f"worker {w}", ns, "input_wait") for w, ns in list(takes.items())[:MOST_BARS])
    return Explanation(
        title=f"Loader worker {slow} is slower than the others",
        summary=f"Worker {slow} of rank {rank} takes {duration(takes[slow])} for a batch, the others"
        f" {duration(_others(takes, slow))}; every {len(takes)} batches the loop waits for it.",
        changes=(
            change(
                f"give worker {slow} what the others have: shards of one size, the same storage, and no core that"
                " training uses"
            ),
            change(
                "`in_order=False` takes whichever batch is ready (torch 2.6 or later; the order then varies)",
                in_order=(settings.training_loader(job, rank).get("in_order"), False),
            ),
        ),
        evidence=Panel("bars", f"Fetching a batch, by worker of rank {rank}", rows, unit="ns"),
        sure="Predicted by replaying the recorded batches, the other workers' fetches in the place of the slow one's.",
    )


def _takes(workers: pd.DataFrame, rank: int) -> dict[int, float]:
    mine = workers[(workers["rank"] == rank) & (workers["worker"] >= 0)]
    return {int(w): float(ns) for w, ns in zip(mine["worker"], mine["dur_ns"], strict=True)}


def _others(takes: Mapping[int, float], worker: int) -> float:
    return median(ns for w, ns in takes.items() if w != worker)


RULE = Rule(
    "slow_worker_batches",
    "One slow loader worker",
    check,
    saves_from=("input_wait",),
    feeds=True,
)
