"""The process groups of a job: all ranks, those that share a layer, those that hold the same part of it."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.simulator.hardware import Link
from benchmarks.simulator.job import Job

WORLD = "0"  # the default group


def groups(job: Job) -> Mapping[str, tuple[tuple[int, ...], Link]]:
    """Return each group's ranks and what it exchanges over; nothing where a rank is alone.

    Groups are numbered as PyTorch numbers them: in the order in which they are made, the same on all ranks.
    """
    if job.ranks == 1:
        return {}
    world = tuple(range(job.ranks))
    made = {WORLD: (world, job.link)}
    if job.pipeline is not None:
        link = Link(start=12_000, bandwidth=job.pipeline.bus)
        return made | {pair(stage): ((stage, stage + 1), link) for stage in range(job.ranks - 1)}
    if job.tensor > 1:
        for first in range(0, job.ranks, job.tensor):
            made[str(len(made))] = (tuple(range(first, first + job.tensor)), job.link)
        if job.ranks > job.tensor:
            for part in range(job.tensor):
                made[str(len(made))] = (world[part :: job.tensor], job.link)
    return made


def tensor_group(job: Job, rank: int) -> str:
    """Return the group of the ranks that share each layer with this one."""
    return str(1 + rank // job.tensor)


def data_group(job: Job, rank: int) -> str:
    """Return the group that exchanges gradients with this rank; "" where nobody does."""
    if job.tensor == 1:
        return WORLD
    return "" if job.ranks == job.tensor else str(1 + job.ranks // job.tensor + rank % job.tensor)


def pair(stage: int) -> str:
    """Return the name of the link between a stage of a pipeline and the next; the trace names the group of all."""
    return f"stages {stage} and {stage + 1}"


def described(group: str) -> str:
    """Return a group's description, as a trace tells it."""
    return "default_pg" if group == WORLD else f"mesh_{group}"
