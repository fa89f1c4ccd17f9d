"""Faults of memory: batches that are smaller than they need be, and activations that leave no room for larger ones."""

from __future__ import annotations

from dataclasses import replace

from simulator import memory
from simulator.faults.fault import Fault, draws, small
from simulator.job import Job, Memory, Recording

# Of the memory, where tools warn that little is left.
_FULL = 0.92


def _room(seed: int) -> Job:
    return replace(small(seed, draws(seed).uniform(0.5, 0.8)), used_memory=0.15)


def _thin(seed: int, ratio: float) -> Job:
    """Return a job that its host holds up, of a model of few parameters, so that activations are most of its memory."""
    job = small(seed, ratio)
    return replace(job, model=replace(job.model, vocabulary=1_024), memory=Memory())


def _needs(job: Job) -> float:
    """Return the bytes that a job's tensors and its context need at most."""
    assert job.memory is not None
    ample = replace(job, memory=replace(job.memory, total=10**13))
    return memory.simulated(ample).allocator.peak_allocated + job.memory.context


def _counted(seed: int) -> Job:
    """Return a job on a device that holds a batch so many times as large, and none that is larger."""
    rng = draws(seed)
    job = _thin(seed, rng.uniform(0.3, 0.6))
    return _on_device_of(job, _needs(larger(job, rng.uniform(1.6, 6.0))) / _FULL)


def _full(seed: int) -> Job:
    """Return a job whose device holds its batch and no larger one, and waits for launches in every step."""
    job = _thin(seed, draws(seed).uniform(0.2, 0.4))
    # Narrow and deep: activations outweigh the parameters and CUDA's context.
    job = replace(job, model=replace(job.model, blocks=64, hidden=128, tokens=4 * job.model.tokens))
    return _on_device_of(job, 1.03 * _needs(job) / _FULL)


def _on_device_of(job: Job, total: float) -> Job:
    assert job.memory is not None
    return replace(job, memory=replace(job.memory, total=round(total)))


def larger(job: Job, times: float) -> Job:
    """Return the job with a batch so many times as large, in whole sequences, on a device without end."""
    assert job.loader is not None
    sequences = round(times * job.model.tokens / job.model.sequence)
    times = sequences * job.model.sequence / job.model.tokens
    loader = replace(job.loader, fetch=round(times * job.loader.fetch), cpu=round(times * job.loader.cpu))
    made = replace(job, model=replace(job.model, tokens=sequences * job.model.sequence), loader=loader)
    return replace(made, batch=replace(job.batch, size=round(times * job.batch.size)))


def checkpointed(job: Job, times: float) -> Job:
    """Return the job with checkpoints, and a batch so many times as large."""
    assert job.memory is not None
    return larger(replace(job, memory=replace(job.memory, checkpoints=True)), times)


def _long(_: Job) -> Recording:
    return Recording(steps=150, active=5, form="torch-2.13", device_step=True)


FAULTS = (
    Fault(
        "small_batch",
        "memory_headroom",
        "a job that its host holds up, with room for a larger batch",
        _room,
        advised=larger,
        accepted=("host_bound",),
    ),
    Fault(
        "small_batch_counted",
        "memory_headroom",
        "the same, of which it was counted what memory holds, with room for one and a half to six times the batch",
        _counted,
        advised=larger,
        recorded=_long,
        accepted=("host_bound",),
    ),
    Fault(
        "activations_fill",
        "activation_memory",
        "a job that its host holds up, and whose activations leave no room for a larger batch",
        _full,
        advised=checkpointed,
        recorded=_long,
        accepted=("host_bound",),
    ),
)
