"""Simulates jobs: for long and without a profiler, to know the truth, and as they are recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import lcm

from simulator.groups import groups
from simulator.halving import Halves
from simulator.hardware import DEVICES
from simulator.job import Job, Recording
from simulator.pipelining import Stage
from simulator.program import Step
from simulator.records import Window
from simulator.replicating import Replicas
from simulator.simulation import Setup, Simulation, simulate
from simulator.training import Training
from simulator.truth import Truth, truth

WARM = 20  # steps that are left out: the host's queue fills
STEPS = 60
LONGEST_CYCLE = 60


def setup(job: Job, steps: int, window: Window | None = None) -> Setup:
    """Return what the machine runs of a job."""
    makers = [_maker(job, rank) for rank in range(job.ranks)]
    loaders = [made for rank in range(job.ranks) if (made := job.loader_of(rank)) is not None]
    speeds, hosts = dict(job.speeds), dict(job.host_speeds)
    return Setup(
        _by_rank(makers),
        job.ranks,
        steps,
        DEVICES[job.device],
        job.host,
        loaders,
        groups(job),
        [(hosts.get(rank, 1.0), speeds.get(rank, 1.0)) for rank in range(job.ranks)],
        job.seed,
        window,
    )


def _maker(job: Job, rank: int) -> Callable[[int], Step]:
    if job.pipeline is not None:
        return Stage(job, rank).step
    if job.devices > 1:
        return (Halves if job.cut else Replicas)(job, rank).step
    return Training(job, rank).step


def _by_rank(makers: Sequence[Callable[[int], Step]]) -> Callable[[int, int], Step]:
    return lambda rank, number: makers[rank](number)


def play(job: Job, steps: int) -> Simulation:
    """Simulate a job without a profiler."""
    return simulate(setup(job, steps))


def cycle(job: Job) -> int:
    """Return after how many steps all that comes now and then has come as often as it should."""
    pauses, script = job.pauses, job.script
    every = [job.gradients.accumulate, job.epochs.steps + job.epochs.validation or 1]
    every += [script.every if script.items else 1, script.skips or 1]
    for length, often in (
        (pauses.garbage, pauses.garbage_every),
        (pauses.checkpoint, pauses.checkpoint_every),
        (pauses.compile, pauses.compile_every),
        (pauses.retry, pauses.retry_every),
    ):
        every.append(often if length else 1)
    if job.loader is not None and job.loader.slow_worker:
        every.append(job.loader.workers)
    return lcm(*every)


def true(job: Job, warm: int = WARM, steps: int = STEPS) -> Truth:
    """Simulate a job without a profiler; return what is true of it, over whole cycles of about so many steps."""
    whole = min(cycle(job), LONGEST_CYCLE)
    warm, steps = (-(-count // whole) * whole for count in (warm, steps))
    return truth(play(job, warm + steps + 1), warm)


def record(job: Job, recording: Recording) -> Simulation:
    """Simulate a job as it is recorded."""
    window = Window(
        recording.skip + recording.warmup, recording.active, recording.warmup, event=recording.event,
        after=recording.after, own=recording.light,
    )  # fmt: skip
    return simulate(setup(job, recording.steps, window))


def reseeded(job: Job, seed: int) -> Job:
    """Return the same job with other draws."""
    return replace(job, seed=seed)
