"""Faults of how batches come to the training thread, through the queue in front of it, and on to the device.

In some jobs the queue is what a cure comes up against: the thread that pins batches, workers at their limit, and
batches that were fetched before training had begun.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

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


# -- the queue


def _pinning(seed: int, low: float, high: float) -> Job:
    """Return a job whose batches a thread pins for `low` to `high` of a step, at about 4 GB/s.

    That is what it did on one H200's host, for batches of 201 MB.
    """
    job, rng = base(seed, low=15e6, high=50e6), draws(seed)
    pin = rng.uniform(low, high) * step_of(job)
    job = with_loader(job, pin=round(pin), fetch=round(rng.uniform(0.2, 0.5) * 6 * step_of(job)), workers=6)
    return with_batch(job, size=round(pin / 1e9 * rng.uniform(3.5e9, 4.5e9)))


def _bytes(job: Job) -> Job:
    """Return the job with batches of uint8 that the device converts: a quarter of the bytes."""
    assert job.loader is not None
    return with_loader(with_batch(job, size=job.batch.size // 4), pin=job.loader.pin // 4)


def _as_long_pinned(seed: int) -> Job:
    """Return a job of a small model and large batches in pageable memory, which are most of its step."""
    job, rng = base(seed, device="A100", low=3e6, high=5e6), draws(seed)
    copied = rng.uniform(15, 25) * step_of(job)
    rate = DEVICES[job.device].host_link * PAGEABLE_SHARE
    job = with_loader(job, fetch=round(rng.uniform(0.3, 0.6) * 12 * copied), workers=12)
    return with_batch(job, size=round(copied / 1e9 * rate), memory="pageable")


def _pinned_as_long(job: Job) -> Job:
    """Return it with pinned batches: a thread copies at the rate at which they were staged, or a little slower.

    On one H200's host it took 49 to 51 ms for batches whose pageable copies took 46 to 48.
    """
    staged = job.batch.size / (DEVICES[job.device].host_link * PAGEABLE_SHARE) * 1e9
    pin = round(float(np.random.default_rng((job.seed, 96)).uniform(1.05, 1.12)) * staged)
    return with_loader(with_batch(job, memory="pinned", waits=False), pin=pin)


def _ahead_at_first(seed: int, low: float, high: float) -> Job:
    """Return a job whose workers take `low` to `high` of a step for a batch, and have many ready as training begins.

    Its first step is as long as they need to fill their queue: the window then sees batches that wait for it.
    """
    job, rng = base(seed, low=15e6, high=40e6), draws(seed)
    workers, prefetch = 8, int(rng.integers(2, 5))
    fetch = rng.uniform(low, high) * workers * step_of(job)
    job = with_script(job, opening=round(1.3 * prefetch * fetch + 200 * MS))
    return replace(job, loader=Loader(workers, prefetch, round(fetch), round(0.8 * fetch), round(0.05 * fetch)))


def _from_there(_: Job) -> Recording:
    """Record so many steps that most of them are of the steady state."""
    return Recording(steps=240, device_step=True)


def _then_loader(seed: int) -> Job:
    """Return a job that reads its loss, of which the workers make batches hardly faster than it takes them now."""
    job, rng = base(seed, low=25e6, high=60e6), draws(seed)
    step = step_of(job)
    after = rng.uniform(0.2, 0.4) * step
    pace = rng.uniform(0.88, 0.95) * (step + after)
    assert job.loader is not None
    job = with_loader(
        job, fetch=round(pace * job.loader.workers), cpu=round(0.8 * pace * job.loader.workers), jitter=0.05
    )
    return replace(with_script(job, items=1, after=round(after)), modules=True)


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
    Fault(
        "pinning_limits",
        "input_wait",
        "the thread that pins batches takes longer for one than the step",
        lambda seed: _pinning(seed, 1.4, 2.0),
        _bytes,
        recorded=_from_there,
        warm=60,
        steps=240,
        accepted=("exposed_copy",),
        line="loader",
    ),
    Fault(
        "prefetch_used_up",
        "input_wait",
        "workers are too slow, but have many batches ready as training begins",
        lambda seed: _ahead_at_first(seed, 1.4, 2.0),
        enough,
        recorded=_from_there,
        warm=100,
        line="loader",
    ),
    Fault(
        "pinning_as_long",
        "pageable_copy",
        "batches lie in pageable memory, and to pin one takes as long as the step",
        _as_long_pinned,
        _pinned_as_long,
        recorded=_from_there,
        warm=60,
        steps=240,
        harmless=True,
    ),
    Fault(
        "hidden_pinning",
        "input_wait",
        "the thread that pins batches keeps up",
        lambda seed: _pinning(seed, 0.5, 0.8),
        lambda job: with_loader(job, pin=0),
        recorded=_from_there,
        warm=60,
        steps=240,
        accepted=("exposed_copy",),
        harmless=True,
    ),
    Fault(
        "workers_keep_up",
        "input_wait",
        "workers just keep up, and have many batches ready as training begins",
        lambda seed: _ahead_at_first(seed, 0.7, 0.85),
        enough,
        recorded=_from_there,
        warm=100,
        harmless=True,
    ),
    Fault(
        "wait_then_loader",
        "host_sync",
        "the loss is read in each step, and behind that wait is the loader's limit",
        _then_loader,
        lambda job: with_script(job, items=0),
        recorded=_from_there,
        accepted=("host_bound",),
        line="values",
    ),
)
