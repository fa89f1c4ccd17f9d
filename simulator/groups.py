"""The process groups of a job: all ranks, those that share a layer, those that hold the same part of it."""

from __future__ import annotations

from collections.abc import Mapping

from simulator.hardware import Link, bus_factor
from simulator.job import Job

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
        firsts = [rank for rank in range(job.ranks) if (rank + 1) % job.stages]
        made |= {pair(rank): ((rank, rank + 1), link) for rank in firsts}
        if job.pipeline.replicas > 1:
            for stage in range(job.stages):
                made[str(1 + stage)] = (world[stage :: job.stages], _between_replicas(job, str(1 + stage)))
        return made
    if job.tensor > 1:
        for first in range(0, job.ranks, job.tensor):
            made[str(len(made))] = (tuple(range(first, first + job.tensor)), job.link)
        if job.ranks > job.tensor:
            for part in range(job.tensor):
                made[str(len(made))] = (world[part :: job.tensor], job.link)
    return made


def _between_replicas(job: Job, group: str) -> Link:
    """Return what a stage's gradients go over: as slow as with all the ranks that those of the job stand for."""
    assert job.pipeline is not None
    ranks, link = job.pipeline.replicas, job.link
    whole = round(ranks * job.pipeline.stand_for)
    factor = dict(job.links).get(group, 1.0) * bus_factor("all_reduce", ranks) / bus_factor("all_reduce", whole)
    return Link(link.start + link.hop * (whole - ranks), link.hop, link.bandwidth * factor)


def tensor_group(job: Job, rank: int) -> str:
    """Return the group of the ranks that share each layer with this one."""
    return str(1 + rank // job.tensor)


def data_group(job: Job, rank: int) -> str:
    """Return the group that exchanges gradients with this rank; "" where nobody does."""
    if job.pipeline is not None:
        return str(1 + rank % job.stages) if job.pipeline.replicas > 1 else ""
    if job.tensor == 1:
        return WORLD
    return "" if job.ranks == job.tensor else str(1 + job.ranks // job.tensor + rank % job.tensor)


def pair(rank: int) -> str:
    """Return the name of the link between a rank of a pipeline and the next; the trace names the group of all."""
    return f"stages {rank} and {rank + 1}"


def described(group: str) -> str:
    """Return a group's description, as a trace tells it."""
    return "default_pg" if group == WORLD else f"mesh_{group}"
