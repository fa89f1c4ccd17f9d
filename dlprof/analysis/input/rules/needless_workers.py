"""Loader workers cost more than they save.

A worker makes batches beside training, and where training computes on a CPU, on the cores that training needs: an
operator that is split over all cores ends with its last thread, which waits for the core that a worker has. Each batch
also has to be handed over: a worker copies its tensors into shared memory, and the training thread receives a file
descriptor for each of them. Where a batch is cheap to make, or has many tensors, the training thread had better fetch
it itself, and training have all cores.

To send a tensor, a worker copies the whole storage that it is a part of, once for each batch: `frames[first:last]` of
`torch.from_numpy(video)` takes all of the video along. Shared memory (`share_memory_()`), tensors that the data set
keeps, which are there after the first time, and what is stacked into a batch are not copied. A worker whose batches
are copied with four times as many bytes as they hold, and a megabyte more, is told so, with the line that takes the
part.

Needs the batches that dlprof records with the step log, and a job that trains on a CPU. On a GPU's host, workers have
the cores that launching leaves.

Saving: the step with fewer workers, predicted from the recorded batches. What taking a batch that is ready was seen to
take goes with the last worker, and the time that training waited for a core; what a fetch took without waiting for a
core comes to the step. The standard error is half the distance to the gain where workers cost as little as the
recording leaves possible. Where batches carry whole storages, it is the step without what the workers compute to copy
more than a batch holds, and without the waits that the replay does not explain, if that gives at least half as much.

What to change: `.clone()` the part of a larger tensor, or slice an array before it becomes a tensor. Else, or after
that, `num_workers=0`, or the smaller number that is named. PyTorch takes neither `prefetch_factor` nor
`persistent_workers=True` without workers. Cheaper to hand over: fewer and larger tensors a batch.
"""

from __future__ import annotations

from dlprof.analysis import settings
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change
from dlprof.analysis.input.input_waits import LARGER_PART, CopiedStorages, FewerWorkers, copied_storages, fewer_workers
from dlprof.analysis.input.loader import loader_means, worker_means
from dlprof.analysis.machine.cores import binds_itself
from dlprof.errors import NotMeasured
from dlprof.result import Change, Forecast, Panel, Scalar
from dlprof.units import count, duration, percent


def check(
    fewer_workers: FewerWorkers = needs(fewer_workers),
    copied_storages: Maybe[CopiedStorages] = maybe(copied_storages),
    job: Job = needs(JOB),
) -> Estimate:
    copied = copied_storages.or_none()
    if copied is not None and copied.of_cores:
        return Estimate(
            saving_ns=copied.gain_ns,
            by_rank_ns={copied.rank: copied.gain_ns},
            noise_ns=max(copied.gain_ns - copied.least_ns, 0.0) / 2,
            loses="goes to loader workers that copy whole storages, of which samples are parts",
            seen=copied,
        )
    if fewer_workers.gain_ns > 0 and binds_itself(job, fewer_workers.rank):
        raise NotMeasured(
            "its process bound itself to some of its host's cores, which the workers share with training: what they"
            " cost with more cores is not known"
        )
    return Estimate(
        saving_ns=fewer_workers.gain_ns,
        by_rank_ns=fewer_workers.by_rank_ns,
        noise_ns=max(fewer_workers.gain_ns - fewer_workers.least_ns, 0.0) / 2,
        loses="goes to loader workers that cost more than they save",
    )


def explain(
    estimate: Estimate,
    fewer_workers: FewerWorkers = needs(fewer_workers),
    loader_means: Maybe[Frame] = maybe(loader_means),
    worker_means: Maybe[Frame] = maybe(worker_means),
    job: Job = needs(JOB),
) -> Explanation:
    rank, (now, *fewer), chosen = fewer_workers.rank, fewer_workers.forecasts, fewer_workers.chosen
    rows = tuple(
        (
            f"{f.workers}{' (is)' if f is now else ' (proposed)' if f is chosen else ''}",
            f.step_ns,
            now.step_ns / f.step_ns,
        )
        for f in sorted((now, *fewer), key=lambda f: f.workers)
    )
    summary = f"{count(now.workers, 'worker')} of rank {rank} {_does(loader_means, worker_means, rank)}."
    if isinstance(copied := estimate.seen, CopiedStorages):
        alone = (_to(chosen.workers, settings.training_loader(job, rank), chosen.step_ns),)
        return Explanation(
            title="Loader workers copy whole storages",
            summary=f"{summary} {copied.found}",
            changes=(change(copied.remedy), *(alone if fewer_workers.gain_ns >= LARGER_PART * copied.gain_ns else ())),
            sure="Predicted by replaying the recorded batches without what workers compute to copy more than a batch"
            " holds.",
            where=copied.parts,
        )
    return Explanation(
        title="Loader workers cost more than they save",
        summary=summary,
        changes=(_to(chosen.workers, settings.training_loader(job, rank), now.step_ns - estimate.saving_ns),),
        evidence=Panel(
            "table", "Predicted step by number of loader workers", rows, ("num_workers", "mean step_ns", "speed_times")
        ),
        forecasts=tuple(Forecast("num_workers", str(f.workers), f.step_ns) for f in fewer),
        sure="Predicted by replaying the recorded batches without what workers cost training; fetching is taken to take"
        " the training thread as long as it took a worker that had a core.",
    )


def _does(loader_means: Maybe[Frame], worker_means: Maybe[Frame], rank: int) -> str:
    """Say what workers take for a batch, and what training pays."""
    means, workers = (frame[frame["rank"] == rank] for frame in (loader_means.get(), worker_means.get()))
    share = workers["batches"] / workers["batches"].sum()
    fetch, cpu = (float((workers[name] * share).sum(skipna=False)) for name in ("dur_ns", "cpu_ns"))
    taken, delayed = float(means["taken_ns"].iloc[0]), float(means["delayed"].iloc[0])
    costs = [f"taking one over takes the training thread {duration(taken)}"] if taken > 0 else []
    costs += [f"the training thread waits {percent(delayed)} of the time for a core"] if delayed > 0 else []
    s = "s" if len(workers) == 1 else ""
    sends = f", and compute{s} {duration(cpu)} with sending it" if cpu > fetch else ""
    return "; ".join([f"take{s} {duration(fetch)} for a batch{sends}", *costs])


def _to(n: int, loader: settings.Settings, step_ns: float) -> Change:
    """Return the change to fewer workers; without any, what is set for workers has to go."""
    now: Scalar = loader.get("num_workers")
    predicted = f"(is {now}): a step of {duration(step_ns)} is predicted"
    if n or not loader.get("persistent_workers"):
        return change(f"`num_workers={n}` {predicted}", num_workers=(now, n))
    return change(
        f"`num_workers=0, persistent_workers=False`, without `prefetch_factor` {predicted}",
        num_workers=(now, 0),
        persistent_workers=(True, False),
    )


_SAVES_FROM = ("computation", "communication", "input_wait", "optimizer_host", "host", "other")
RULE = Rule("Needless loader workers", check, explain, _SAVES_FROM)
