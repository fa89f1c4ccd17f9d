"""Every worker of a loader delivers the same samples.

A DataLoader gives each of its workers the whole of an `IterableDataset`. Where the data set does not take its share by
`get_worker_info()`, n workers deliver every sample n times, and an epoch takes n times as long.

Needs a recording of dlprof's: the first batches of the workers are compared. Where the rows of a batch are all alike,
or a sample is changed at random, the batches do not tell, and neither does this rule.

Saving: the steps that train on a sample again, all but one of n: the most that it can be, as the data set may have been
meant to be read n times in an epoch.

What to change: in `__iter__`, every n-th sample from the worker's own number on; or a share of the shards.
"""

from __future__ import annotations

from dlprof.analysis import settings
from dlprof.analysis.engine import JOB, Job, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.units import count


def check(mean_step_ns: float = needs(mean_step_ns), job: Job = needs(JOB)) -> Estimate:
    loaders = {rank: settings.training_loader(job, rank) for rank in job.ranks}
    iterated = {r: one for r, one in loaders.items() if one.get("iterable") and (one.get("num_workers") or 0) > 1}
    if not iterated:
        raise DoesNotApply("no loader has several workers and an IterableDataset")
    same_batches = {r: one.get("same_batches") for r, one in iterated.items()}
    if not any(same_batches.values()):
        if None in same_batches.values():
            raise NotMeasured("the batches do not tell whether the workers deliver the same samples")
        return nothing("the workers begin with different batches")
    workers = {r: int(iterated[r]["num_workers"]) for r, same in same_batches.items() if same}
    cost = {r: mean_step_ns * (1 - 1 / n) for r, n in workers.items()}
    return Estimate(
        saving_ns=min(cost.values()),
        by_rank_ns=cost,
        loses="trains on samples that another worker has delivered",
        seen=workers,
    )


def explain(estimate: Estimate, job: Job = needs(JOB)) -> Explanation:
    rank = estimate.worst
    n = estimate.seen[rank]
    dataset = settings.training_loader(job, rank).get("dataset") or "the data set"
    return Explanation(
        title=f"Each of {count(n, 'worker')} delivers the same samples",
        summary=f"On rank {rank} the first batches of all {n} workers are the same: `{dataset}` does not share its"
        f" samples out, so that an epoch holds each of them {n} times.",
        changes=(
            change(
                f"in `{dataset}.__iter__`: `info = torch.utils.data.get_worker_info()`, and only every"
                " `info.num_workers`-th sample from `info.id` on"
                " (https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset)"
            ),
        ),
        sure="The first batches of the workers were compared. The saving is every sample once; the workers then leave"
        " cores free besides.",
    )


_SAVES_FROM = (
    "computation",
    "communication",
    "copy",
    "input_wait",
    "optimizer_host",
    "host",
    "launch_latency",
    "other",
)
RULE = Rule("Workers that deliver the same samples", check, explain, _SAVES_FROM, only_with="loader")
