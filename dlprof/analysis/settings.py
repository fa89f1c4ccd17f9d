"""The settings of the job that advice cites: its loader, its model, its optimizer, as the recorder saw them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dlprof.analysis.engine import Job

Settings = Mapping[str, Any]

# What exchanges between processes that compute on the CPU.
_CPU_BACKENDS = ("gloo", "mpi")


def training_loader(job: Job, rank: int | None = None) -> Settings:
    """Return the settings of a rank's training loader (of the first rank that has one); empty where nobody saw it."""
    for r in [rank] if rank is not None else job.ranks:
        loaders = job.facts.get(r, {}).get("loaders") or []
        train = [x for x in loaders if x.get("role") == "train"] or [x for x in loaders if x.get("role") == "unknown"]
        if train:
            return dict(train[0])
    return {}


def model(job: Job) -> Settings:
    """Return the settings of the largest model; empty where nobody saw it."""
    models = [m for r in job.ranks for m in job.facts[r].get("models") or []]
    return max(models, key=lambda m: m.get("parameters") or 0, default={})


def held(job: Job) -> dict[int, int]:
    """Count the parameters that each rank holds; empty: ranks share each of them, are stages, or nobody saw a model.

    A model that is called with and without what wraps it is listed twice. So ranks hold the same, whatever is listed,
    where their optimizers have equally many parameters.
    """
    models = {r: job.facts[r].get("models") or [] for r in job.ranks}
    trained = {sum(o.get("parameters") or 0 for o in job.facts[r].get("optimizers") or []) for r in job.ranks}
    parted = any(job.facts[r].get("pipeline") or any(m.get("fsdp") for m in models[r]) for r in job.ranks)
    counts = {r: sum(int(m.get("parameters") or 0) for m in mine) for r, mine in models.items()}
    return counts if all(counts.values()) and len(trained) > 1 and not parted else {}


def optimizer(job: Job) -> Settings:
    """Return the settings of the optimizer with most parameters; empty where nobody saw it."""
    optimizers = [o for r in job.ranks for o in job.facts[r].get("optimizers") or []]
    return max(optimizers, key=lambda o: o.get("parameters") or 0, default={})


def cores(job: Job, rank: int) -> float | None:
    """Return how many cores' time a rank's process may use, with whoever else may; None: nobody knows."""
    cpu = job.facts.get(rank, {}).get("cpu") or {}
    given = cpu.get("affinity") or cpu.get("count")
    if not isinstance(given, int):
        return None
    return min(float(given), cpu.get("quota") or float(given))


def host(job: Job, rank: int) -> str:
    """Return the name of a rank's host, as recorded, else as its trace has it; "" where neither has."""
    return str(job.facts[rank].get("host") or job.trace_facts[rank].get("host") or "")


def neighbours(job: Job, rank: int) -> int:
    """Count the ranks on a rank's host, itself among them."""
    mine = host(job, rank)
    return max(1, sum(host(job, r) == mine for r in job.ranks))


def cores_per_rank(job: Job, rank: int) -> int | None:
    """Return how many cores a rank can count on: those it may use, shared by ranks of its host that have the same."""
    there = cores(job, rank)
    return None if there is None else max(1, int(there // neighbours(job, rank)))


def on_cpu(job: Job) -> bool:
    """Return whether the job is known to train on the CPU: from the recording, else from traces that list no device."""
    kinds = {(job.facts[r].get("device") or {}).get("type") for r in job.ranks}
    if kinds != {None}:
        return kinds == {"cpu"}
    # Devices that Kineto does not know are not listed either; the backend of their collectives tells.
    said = [job.trace_facts[r] for r in job.ranks]
    return all(f.get("devices") == [] and f.get("backend", "gloo") in _CPU_BACKENDS for f in said)


def torch_version(job: Job, rank: int) -> tuple[int, int] | None:
    """Return the version of a rank's torch, (2, 9) of "2.9.1+cu128"; None where nobody recorded it."""
    return version_of(job.facts.get(rank, {}))


def version_of(facts: Settings) -> tuple[int, int] | None:
    """Return the version of torch by a rank's facts, as `torch_version` does."""
    said = re.match(r"(\d+)\.(\d+)", str((facts.get("versions") or {}).get("torch") or ""))
    return (int(said[1]), int(said[2])) if said else None


def allocator(job: Job, rank: int) -> tuple[str, str | None]:
    """Return the variable to configure the job's allocator by, and its value; None: it is not set.

    PYTORCH_ALLOC_CONF is the name from torch 2.9 on. A job that sets an older one is told that: torch 2.13 reads its
    CUDA settings from the first of these that is set, the oldest first (c10/cuda/CUDAAllocatorConfig.h).
    """
    env = job.facts.get(rank, {}).get("env") or {}
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if env.get(name):
            return name, str(env[name])
    return "PYTORCH_ALLOC_CONF" if (torch_version(job, rank) or (0, 0)) >= (2, 9) else "PYTORCH_CUDA_ALLOC_CONF", None
