"""Faults of how batches come to the training thread and to the device."""

from __future__ import annotations

from dataclasses import replace

from simulator.faults.fault import Fault, base, draws, step_of, with_batch, with_loader, with_script
from simulator.hardware import DEVICES, MS, PAGEABLE_SHARE
from simulator.job import Epochs, Job, Recording
from simulator.loading import Loader

_RESTARTED = 20  # steps of an epoch


def _loader(workers: int, fetch: float) -> Loader:
    return Loader(workers, 2, round(fetch), round(0.7 * fetch), round(0.05 * fetch))


def _no_workers(seed: int) -> Job:
    job = base(seed)
    return replace(job, loader=_loader(0, draws(seed).uniform(1.15, 1.8) * step_of(job)))


def _few_workers(seed: int) -> Job:
    job = base(seed)
    return replace(job, loader=_loader(2, draws(seed).uniform(2.5, 3.6) * step_of(job)))


def enough(job: Job) -> Job:
    """Return the job, its loader with as many workers as keep up, and no more."""
    assert job.loader is not None
    return with_loader(job, workers=int(job.loader.fetch / (0.8 * step_of(job))) + 1)


def _slow_rank(seed: int) -> Job:
    job, rng = base(seed, ranks=4), draws(seed)
    slow = _loader(2, 2 * rng.uniform(1.2, 1.6) * step_of(job))
    return replace(job, rank_loaders=((int(rng.integers(0, 4)), slow),))


def _fast_rank(job: Job) -> Job:
    rank, slow = job.rank_loaders[0]
    more = int(slow.fetch / (0.8 * step_of(job))) + 1
    return replace(job, rank_loaders=((rank, replace(slow, workers=more)),))


def _slow_worker(seed: int) -> Job:
    job, rng = base(seed), draws(seed)
    step = step_of(job)
    fetch = rng.uniform(1.0, 2.0) * step
    late = rng.uniform(1.2, 1.6) * 4 * step - fetch
    return replace(job, loader=replace(_loader(4, fetch), slow_worker=round(late)))


def _restarted(seed: int) -> Job:
    job, rng = base(seed, high=60e6), draws(seed)
    job = replace(job, epochs=Epochs(_RESTARTED))
    # Longer than what the device still has queued.
    return with_loader(job, persistent=False, start=round(rng.uniform(9, 16) * step_of(job)), stop=30 * MS)


def _long(job: Job) -> Recording:
    return Recording(steps=8 * (job.epochs.steps + job.epochs.validation), form="torch-2.8", device_step=True)


def _copied(seed: int, memory: str, low: float, high: float) -> Job:
    """Return a job whose copies of batches take `low` to `high` of its computation."""
    job, rng = base(seed), draws(seed)
    rate = DEVICES[job.device].host_link * (PAGEABLE_SHARE if memory == "pageable" else 1.0)
    return with_batch(job, size=round(rng.uniform(low, high) * step_of(job) / 1e9 * rate), memory=memory)


def _pageable(seed: int) -> Job:
    return with_batch(_copied(seed, "pageable", 0.12, 0.4), waits=bool(seed % 2))


def _pinned(job: Job) -> Job:
    """Return the job with pinned batches: a thread copies them, at the rate at which they were staged before."""
    rate = DEVICES[job.device].host_link * PAGEABLE_SHARE
    return with_loader(with_batch(job, memory="pinned", waits=False), pin=round(job.batch.size / rate * 1e9))


def _exposed(seed: int) -> Job:
    return _copied(seed, "pinned", 0.12, 0.4)


def _ahead(job: Job) -> Job:
    return with_batch(job, ahead=True)


def _blocking(seed: int) -> Job:
    job, rng = _copied(seed, "pinned", 0.01, 0.04), draws(seed)
    return with_script(with_batch(job, waits=True), before=round(rng.uniform(0.12, 0.35) * step_of(job)))


def _not_blocking(job: Job) -> Job:
    return with_batch(job, waits=False)


FAULTS = (
    Fault(
        "no_workers", "input_wait", "the training thread loads its batches itself", _no_workers, enough, line="loader"
    ),
    Fault(
        "few_workers", "input_wait", "two workers where three or four are needed", _few_workers, enough, line="loader"
    ),
    Fault(
        "slow_loader_one_rank",
        "input_wait",
        "one of four ranks' loaders is slow",
        _slow_rank,
        _fast_rank,
        accepted=("straggler",),
    ),
    Fault(
        "slow_worker",
        "slow_worker_batches",
        "one of four workers takes several times as long as the others",
        _slow_worker,
        lambda job: with_loader(job, slow_worker=0),
        recorded=lambda job: Recording(steps=240, device_step=True),  # noqa: ARG005
        accepted=("input_wait",),
    ),
    Fault(
        "restarted_workers",
        "worker_restart",
        "workers start anew in every epoch of 20 steps",
        _restarted,
        lambda job: with_loader(job, persistent=True),
        scope="loop",
        recorded=_long,
        steps=5 * _RESTARTED,
    ),
    Fault("pageable", "pageable_copy", "batches lie in pageable memory", _pageable, _pinned, line="loader"),
    Fault("exposed_copy", "exposed_copy", "large batches are copied on the computing stream", _exposed, _ahead),
    Fault(
        "blocking_copy",
        "blocking_copy",
        "the script waits for its batch's copy, and then runs Python",
        _blocking,
        _not_blocking,
        accepted=("host_bound", "host_sync"),
        line="batch",
    ),
)
