"""The settings of the job that advice refers to: its loader, model and optimizer, as recorded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dlprof.analysis.engine import Job

Settings = Mapping[str, Any]

# The setting with which the allocator joins freed pieces of different sizes.
EXPANDABLE = "expandable_segments:True"

# Backends of jobs that train on the CPU.
_CPU_BACKENDS = ("gloo", "mpi")

# The optimizers of torch 2.13 with a parameter `fused`, for recordings that do not say what theirs takes.
_FUSED = ("Adagrad", "Adam", "AdamW", "SGD")


def training_loader(job: Job, rank: int | None = None) -> Settings:
    """Return the settings of a rank's training loader (of the first rank that has one); empty without one."""
    for r in [rank] if rank is not None else job.ranks:
        if found := loader_of(job.facts.get(r, {})):
            return found
    return {}


def batch_of(facts: Settings) -> object:
    """Return the batch size of a rank's training loader by its facts; None: not known."""
    return loader_of(facts).get("batch_size")


def loader_of(facts: Settings) -> Settings:
    """Return the settings of a rank's training loader by its facts; empty without one."""
    loaders = facts.get("loaders") or []
    train = [x for x in loaders if x.get("role") == "train"] or [x for x in loaders if x.get("role") == "unknown"]
    return dict(train[0]) if train else {}


def lacks_loader(job: Job) -> bool:
    """Return whether the job was recorded, and none of its ranks made a DataLoader."""
    return bool(job.ranks) and all(job.facts[r].get("loaders") == [] for r in job.ranks)


def model(job: Job) -> Settings:
    """Return the settings of the largest model; empty without one."""
    models = [m for r in job.ranks for m in job.facts[r].get("models") or []]
    return max(models, key=lambda m: m.get("parameters") or 0, default={})


def broadcasts_buffers(model: Settings) -> bool:
    """Return whether DistributedDataParallel sends rank 0's buffers to all ranks before each forward pass."""
    ddp = model.get("ddp")
    return bool(ddp) and (ddp or {}).get("broadcast_buffers") is not False


def buffers_argument(version: tuple[int, int] | None) -> str:
    """Return what a version of torch calls the argument `broadcast_buffers`; None: not known, the name of today.

    With the new name buffers are still sent once, as the model is wrapped.
    """
    return "broadcast_buffers" if version is not None and version < (2, 13) else "forward_sync_buffers"


def held(job: Job) -> dict[int, int]:
    """Count the parameters that each rank holds; empty if ranks shard them, are stages, or no model was recorded.

    A model that is called with and without its wrapper is listed twice. So ranks hold the same, whatever is listed,
    if their optimizers have the same number of parameters.
    """
    models = {r: job.facts[r].get("models") or [] for r in job.ranks}
    trained = {sum(o.get("parameters") or 0 for o in job.facts[r].get("optimizers") or []) for r in job.ranks}
    parted = any(job.facts[r].get("pipeline") or any(m.get("fsdp") for m in models[r]) for r in job.ranks)
    counts = {r: sum(int(m.get("parameters") or 0) for m in mine) for r, mine in models.items()}
    return counts if all(counts.values()) and len(trained) > 1 and not parted else {}


def optimizer(job: Job) -> Settings:
    """Return the settings of the optimizer with most parameters; empty without one."""
    optimizers = [o for r in job.ranks for o in job.facts[r].get("optimizers") or []]
    return max(optimizers, key=lambda o: o.get("parameters") or 0, default={})


def takes_fused(optimizer: Settings) -> bool:
    """Return whether an optimizer of these settings can be made with `fused`: by its class where nothing else says."""
    takes = optimizer.get("takes")
    return optimizer.get("class") in _FUSED if takes is None else "fused" in takes


def cores(job: Job, rank: int) -> float | None:
    """Return how many cores a rank's process may use, shared or not; None: not known."""
    cpu = job.facts.get(rank, {}).get("cpu") or {}
    given = cpu.get("affinity") or cpu.get("count")
    if not isinstance(given, int):
        return None
    return min(float(given), cpu.get("quota") or float(given))


def threads(job: Job, rank: int) -> int | None:
    """Return with how many threads a rank computes an operator on the CPU; None: not known."""
    found = (job.facts.get(rank, {}).get("cpu") or {}).get("torch_threads")
    return found if isinstance(found, int) else None


def host(job: Job, rank: int) -> str:
    """Return the name of a rank's host from the recording, else from its trace; "" where it is not known."""
    return str(job.facts[rank].get("host") or job.trace_facts[rank].get("host") or "")


def device(job: Job, rank: int) -> str:
    """Return the name of a rank's device from the recording, else from its trace; "" where it is not known."""
    devices = [job.facts[rank].get("device") or {}, *(job.trace_facts[rank].get("devices") or ())]
    return next((str(d["name"]) for d in devices[:2] if d.get("name")), "")


def untraced_by_choice(job: Job) -> tuple[int, ...]:
    """Return the ranks without a trace by the user's choice (--ranks)."""
    return tuple(r for r in job.ranks if (job.facts[r].get("window") or {}).get("state") == "not_asked")


def neighbours(job: Job, rank: int) -> int:
    """Count the ranks on a rank's host, itself among them."""
    mine = host(job, rank)
    return max(1, sum(host(job, r) == mine for r in job.ranks))


def is_bound(job: Job, rank: int) -> bool:
    """Return whether a rank, alone on its host, may use only some of the host's cores."""
    cpu = job.facts[rank].get("cpu") or {}
    bound, there = cpu.get("affinity"), cpu.get("count")
    return bool(bound and there and bound < there and neighbours(job, rank) == 1)


def cores_per_rank(job: Job, rank: int) -> int | None:
    """Return a rank's share of the cores that it may use, divided among the ranks of its host; None: not known."""
    usable = cores(job, rank)
    return None if usable is None else max(1, int(usable // neighbours(job, rank)))


def on_cpu(job: Job) -> bool:
    """Return whether the job is known to train on the CPU: from the recording, else from traces that list no device."""
    kinds = _device_types(job)
    if kinds != {None}:
        return kinds == {"cpu"}
    # Devices that Kineto does not know are not listed either; the backend of their collectives shows them.
    facts = [job.trace_facts[r] for r in job.ranks]
    return all(f.get("devices") == [] and f.get("backend", "gloo") in _CPU_BACKENDS for f in facts)


def loader_alone(job: Job) -> bool:
    """Return whether this is the reference workload of a loader alone (`dlprof run loader_variants --ceiling`)."""
    words = job.run.command
    return "--ceiling" in words and any(word.endswith("loader_variants.py") for word in words)


def of_inference(job: Job) -> bool:
    """Return whether the traces are of an inference server, and nothing trains."""
    return any(facts.get("inference") for facts in job.trace_facts.values())


def only_forward(job: Job) -> bool:
    """Return whether traces of a job that dlprof did not record hold no backward pass."""
    return not job.run.recorded and all(job.trace_facts[r].get("backward") is False for r in job.ranks)


def passes(job: Job) -> str:
    """Return what a step goes through, in words."""
    return "forward pass" if only_forward(job) else "forward and backward pass"


def through_host(job: Job) -> bool:
    """Return whether gloo exchanges what lies on GPUs."""
    return any(f.get("backend") == "gloo" and (f.get("device") or {}).get("type") == "cuda" for f in job.facts.values())


def on_gpu(job: Job) -> bool:
    """Return whether the job is known to train on a device that is no CPU, by the same."""
    kinds = _device_types(job)
    traced = any(job.trace_facts[r] for r in job.ranks)
    return bool(kinds - {"cpu", None}) or (kinds == {None} and traced and not on_cpu(job))


def _device_types(job: Job) -> set[str | None]:
    return {(job.facts[r].get("device") or {}).get("type") for r in job.ranks}


def torch_version(job: Job, rank: int) -> tuple[int, int] | None:
    """Return the version of a rank's torch, (2, 9) of "2.9.1+cu128"; None where it was not recorded."""
    return version_of(job.facts.get(rank, {}))


def version_of(facts: Settings) -> tuple[int, int] | None:
    """Return the version of torch by a rank's facts, as `torch_version` does."""
    found = re.match(r"(\d+)\.(\d+)", str((facts.get("versions") or {}).get("torch") or ""))
    return (int(found[1]), int(found[2])) if found else None


def allocator(job: Job, rank: int) -> tuple[str, str | None]:
    """Return the variable that configures the job's allocator, and its value; None: it is not set.

    PYTORCH_ALLOC_CONF is the name from torch 2.9 on. An older one that the job sets is returned: torch 2.13 reads its
    CUDA settings from the first of these that is set, the oldest first (c10/cuda/CUDAAllocatorConfig.h).
    """
    env = job.facts.get(rank, {}).get("env") or {}
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if env.get(name):
            return name, str(env[name])
    return "PYTORCH_ALLOC_CONF" if (torch_version(job, rank) or (0, 0)) >= (2, 9) else "PYTORCH_CUDA_ALLOC_CONF", None
