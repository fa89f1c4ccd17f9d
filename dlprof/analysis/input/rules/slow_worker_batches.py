"""One loader worker is slower than the others, and the queue waits for it.

Batches are taken in order, and each n-th is the same worker's: a worker that is slow holds up every n-th batch, however
many the others have ready. What makes it slow may be its shard of the data, the storage that it reads from, or the core
that it shares.

Needs the batches that dlprof records with the step log, and at least two workers.

Saving: the wait that is gone when the slow worker fetches as the others do: the recorded batches are replayed in order,
once as they were and once with others' fetches in the place of its own.

What to change: give every worker the same work (shards of one size, on the same storage, shuffled before they are
shared out); for an iterable data set, share out samples instead of files; do not bind a worker to the core on which
training runs. `in_order=False` (torch 2.6 or later) takes whichever batch is ready, in another order at each run.
"""

from __future__ import annotations

from dlprof.analysis import settings
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.input.input_waits import AllLoopTimes, freed_by_equal_workers, loop_times
from dlprof.analysis.input.loader import slowest_workers, worker_means
from dlprof.analysis.step.breakdown import breakdown, part
from dlprof.analysis.step.savings import own_time, saving_input
from dlprof.analysis.timeline.steps import step_series
from dlprof.result import Panel
from dlprof.units import duration

# A worker is slow where the others take less than this share of its time: the score under which NVIDIA's resiliency
# extension calls a rank a straggler.
SCORE = 0.75

MOST_BARS = 60


def check(
    slowest_workers: Frame = needs(slowest_workers),
    breakdown: Maybe[Frame] = maybe(breakdown),
    loop_times: Maybe[AllLoopTimes] = maybe(loop_times),
    step_series: Maybe[Frame] = maybe(step_series),
    own_time: Maybe[Frame] = maybe(own_time),
) -> Estimate:
    slow = slowest_workers[slowest_workers["others_ns"] < SCORE * slowest_workers["dur_ns"]]
    if not len(slow):
        return nothing("the workers of each loader take about as long as each other for a batch")
    wait, recorded = part(breakdown.get(), "input_wait"), loop_times.get()
    gone = {
        rank: wait.get(rank, 0.0) * freed_by_equal_workers(recorded, rank, worker)
        for rank, worker in zip(slow["rank"].tolist(), slow["worker"].tolist(), strict=True)
    }
    return Estimate(
        saving_ns=saving_input(step_series.get(), own_time.get(), gone),
        by_rank_ns=gone,
        noise_of=("input_wait",),
        loses="waits for one slow loader worker",
    )


def explain(
    estimate: Estimate,
    slowest_workers: Frame = needs(slowest_workers),
    worker_means: Frame = needs(worker_means),
    job: Job = needs(JOB),
) -> Explanation:
    rank = estimate.worst
    slow = estimate.rows(slowest_workers).iloc[0]
    bars = estimate.rows(worker_means[worker_means["worker"] >= 0]).head(MOST_BARS)
    worker = int(slow["worker"])
    rows = tuple((f"worker {w}", ns, "input_wait") for w, ns in zip(bars["worker"], bars["dur_ns"], strict=True))
    return Explanation(
        title=f"Loader worker {worker} is slower than the others",
        summary=f"Worker {worker} of rank {rank} takes {duration(slow['dur_ns'])} for a batch, the others"
        f" {duration(slow['others_ns'])}; every {slow['workers']:.0f} batches the loop waits for it.",
        changes=(
            change(
                f"give worker {worker} what the others have: shards of one size, the same storage, and no core that"
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


RULE = Rule("One slow loader worker", check, explain, ("input_wait",), feeds=True, only_with="loader")
