"""Faults of the queue in front of the training thread, and jobs in which it is what a cure comes up against.

The thread that pins batches, workers at their limit, and batches that were fetched before training had begun.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from simulator.faults.fault import Fault, base, draws, step_of, with_batch, with_loader, with_script
from simulator.faults.loading import enough
from simulator.hardware import DEVICES, MS, PAGEABLE_SHARE
from simulator.job import Job, Recording
from simulator.loading import Loader


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
