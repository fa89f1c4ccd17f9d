"""A job as data: model, machine, the script's habits, how ranks exchange gradients; its process groups, and its places.

A fault is a job, and its fix another one that differs from it in nothing but what the advice names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from simulator.hardware import DEVICES, MS, US, Device, Host, Link, bus_factor
from simulator.loading import Loader
from simulator.model import Model


@dataclass(frozen=True)
class Batch:
    """How a batch comes to the device."""

    size: int = 12_000_000
    memory: str = "pinned"  # or pageable
    waits: bool = False  # without non_blocking=True the host waits for the stream
    ahead: bool = False  # on a stream of its own, one batch ahead


@dataclass(frozen=True)
class Script:
    """What the training loop does apart from training. Times in ns of the training thread."""

    before: int = 300 * US  # Python before the forward pass
    after: int = 200 * US  # and behind the optimizer
    items: int = 0  # values that it reads with .item() at the end of a step
    every: int = 1  # only in every n-th step
    readers: tuple[int, ...] = ()  # ranks that do so; empty: all
    item_memory: str = "pinned"  # that .item() copies into: pinned from torch 2.3 on, pageable before
    waits: bool = False  # torch.cuda.synchronize() at the end of each step
    laps: bool = False  # torch.cuda.synchronize() behind forward, backward and the optimizer, to time them
    values: str = ""  # loss and accuracy of each step: "read" where they come to be, "kept" in tensors; "": none
    norms: str = ""  # of the gradients, behind the backward pass: "items", read one by one, "total", as one, not read
    hooks: bool = False  # on each gradient, which read its norm
    ema: str = ""  # of the parameters, behind the optimizer: "loop" over them, "foreach"
    opening: int = 0  # ns that the first forward pass takes longer: libraries load and kernels are chosen
    masks: int = 0  # boolean masks as an index, in what it computes of the outputs at the end of a step
    captured: str = ""  # as CUDA graphs: "all" of the step is one, or of the "model" the forward and the backward pass
    skips: int = 0  # every n-th batch is left at once (`continue`); 0: none
    waits_on_host: int = 0  # a host function in the stream, ns
    waits_on_stream: int = 0  # ns of work in another stream that the forward pass waits for
    graph_waits: int = 0  # ns that the nodes of a captured graph wait


@dataclass(frozen=True)
class Tables:
    """Tables of embeddings beside the model. Of each: what a step's features hold, and what the host takes."""

    count: int = 0
    size: int = 1_000_000  # bytes
    on: str = "device"  # or host
    lookup: int = 300 * US
    gradient: int = 600 * US


@dataclass(frozen=True)
class Optimizer:
    """kind: fused, foreach, single (a loop over the parameters)."""

    name: str = "AdamW"
    kind: str = "fused"


@dataclass(frozen=True)
class Gradients:
    """How gradients are exchanged. how: ddp, after (by the script, behind the backward pass), fsdp."""

    how: str = "ddp"
    bucket: int = 25 << 20  # bytes
    dtype: str = "float32"
    accumulate: int = 1  # batches for one step of the optimizer
    seldom: bool = True  # no_sync(): exchanged only before the optimizer steps
    search: bool = False  # find_unused_parameters
    buffers: bool = False  # DDP broadcasts the model's buffers before each forward pass
    slowdown: float = 0.0  # by how much kernels of the backward pass take longer while buckets are exchanged
    flat: bool = False  # of "after": all gradients in one tensor
    bus: float = 180e9  # bytes/s
    start: int = 18_000  # ns until a collective moves bytes


@dataclass(frozen=True)
class Pauses:
    """What comes every so many steps, ns; 0: never."""

    garbage: int = 0
    garbage_every: int = 3
    checkpoint: int = 0
    checkpoint_every: int = 20
    compile: int = 0
    compile_every: int = 4
    retry: int = 0  # the allocator frees its cache: cudaFree of all, cudaMalloc anew
    retry_every: int = 3


@dataclass(frozen=True)
class Epochs:
    """Epochs of so many steps, and what lies between them. 0: one that never ends."""

    steps: int = 0
    validation: int = 0  # batches


@dataclass(frozen=True)
class Pipeline:
    """A pipeline over all ranks, or several side by side. schedule: GPipe, 1F1B. `split`: the blocks of each stage."""

    schedule: str = "1F1B"
    microbatches: int = 8
    split: tuple[int, ...] = ()
    bus: float = 100e9
    replicas: int = 1  # pipelines, each of neighbouring ranks; ranks of the same stage exchange gradients
    stand_for: float = 1.0  # so many times as many take part in these exchanges: all but these are copies of them


@dataclass(frozen=True)
class Memory:
    """What of the job decides over its memory; its allocator is then simulated, tensor by tensor. Bytes."""

    total: int = 0  # of the device; 0: that of its kind
    context: int = 520 << 20  # of CUDA, outside the allocator
    moments: int = 2  # values that the optimizer keeps of a parameter: 2 of Adam, 1 of SGD with momentum
    checkpoints: bool = False  # blocks save their input alone, and run again in the backward pass


@dataclass(frozen=True)
class Job:
    """A training job. Of what differs between ranks, (rank, value) pairs."""

    name: str = "job"
    seed: int = 0
    device: str = "A100"
    ranks: int = 1
    hosts: int = 1
    host: Host = field(default_factory=Host)
    model: Model = field(default_factory=Model)
    loader: Loader | None = field(default_factory=Loader)
    rank_loaders: tuple[tuple[int, Loader], ...] = ()
    batch: Batch = field(default_factory=Batch)
    script: Script = field(default_factory=Script)
    tables: Tables = field(default_factory=Tables)
    optimizer: Optimizer = field(default_factory=Optimizer)
    gradients: Gradients = field(default_factory=Gradients)
    pauses: Pauses = field(default_factory=Pauses)
    epochs: Epochs = field(default_factory=Epochs)
    pipeline: Pipeline | None = None
    tensor: int = 1  # ranks that share each layer
    experts: bool = False  # the feed-forward layers are spread over all ranks: tokens travel by all-to-all
    routing: tuple[float, ...] = ()  # of experts: each rank's mean share of all tokens; empty: all get as many
    routing_spread: float = 0.1  # by how much layers and steps differ from that
    work: tuple[tuple[int, float], ...] = ()  # a rank's share of tokens, of the model's
    sleeps: tuple[tuple[int, int], ...] = ()  # ns that a rank sleeps in every step
    speeds: tuple[tuple[int, float], ...] = ()  # what all of a rank's kernels take, as a factor
    host_speeds: tuple[tuple[int, float], ...] = ()  # what a rank's calls take, as a factor
    clocks: tuple[tuple[int, float], ...] = ()  # a rank's clock, of its maximum: it is hot
    links: tuple[tuple[str, float], ...] = ()  # a process group's bandwidth, as a factor
    devices: int = 1  # that one process drives: nn.DataParallel, or
    cut: int = 0  # the model's layers lie on them, and a batch goes through in so many micro-batches
    modules: bool = False  # the trace names its modules
    used_memory: float = 0.75  # share of the device's memory that is reserved, where it is not simulated:
    memory: Memory | None = None  # of one rank

    def tokens_of(self, rank: int) -> int:
        """Return the tokens of a rank's batch."""
        return round(self.model.tokens * dict(self.work).get(rank, 1.0) / 64) * 64

    @property
    def link(self) -> Link:
        """What gradients go over."""
        return Link(start=self.gradients.start, bandwidth=self.gradients.bus)

    @property
    def stages(self) -> int:
        """Return how many ranks make one pipeline."""
        return self.ranks // (self.pipeline.replicas if self.pipeline is not None else 1)

    def host_of(self, rank: int) -> int:
        """Return on which host a rank runs."""
        return rank * self.hosts // self.ranks

    def loader_of(self, rank: int) -> Loader | None:
        """Return a rank's loader."""
        return dict(self.rank_loaders).get(rank, self.loader)


@dataclass(frozen=True)
class Recording:
    """How a job is recorded, and what its files look like: kineto.FORMS are the traces' forms."""

    steps: int = 40
    skip: int = 10
    warmup: int = 2
    active: int = 5
    form: str = "torch-2.13"
    light: bool = True  # dlprof's own logs as well as the traces
    device_step: bool = False  # steps.jsonl has device_step_ns
    clock_offsets: tuple[int, ...] = ()  # of each host, ns
    clock_drift: tuple[float, ...] = ()  # of each host, parts of one
    event: int = 1_500  # that each traced event costs the host, ns
    shapes: bool = False
    after: float = 1.0
    pause: int = 20 * MS


# -- process groups: all ranks, those that share a layer, those that hold the same part of it


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


# -- where ranks run, and what their hosts' clocks show


# Kineto's bases are whole multiples of three months since 1970 (ChromeTraceBaseTime).
BASE_NS = 1_735_632_360_000_000_000
# When simulated time is 0: some weeks later.
EPOCH_NS = BASE_NS + 40 * 86_400 * 1_000_000_000


@dataclass(frozen=True)
class Clock:
    """A host's clock against the true one."""

    offset: int = 0
    drift: float = 0.0

    def at(self, ns: int) -> int:
        """Return the Unix time, in ns, that the host's clock shows at a true time."""
        return EPOCH_NS + self.offset + ns + round(ns * self.drift)


@dataclass(frozen=True)
class Place:
    """Where a rank runs, and what its trace says of the job."""

    rank: int
    world_size: int
    host: str
    pid: int
    device_index: int
    devices: int  # of the host
    device: Device
    clock: Clock
    groups: Mapping[str, tuple[int, ...]]
    base_ns: int = BASE_NS  # that relative times count from


def places(job: Job, recording: Recording, groups: Mapping[str, tuple[int, ...]]) -> list[Place]:
    """Return where each rank runs."""
    made: list[Place] = []
    per_host = max(-(-job.ranks // job.hosts), job.devices)
    for rank in range(job.ranks):
        host = job.host_of(rank)
        index = sum(job.host_of(r) == host for r in range(rank))
        offset = recording.clock_offsets[host] if recording.clock_offsets else 0
        drift = recording.clock_drift[host] if recording.clock_drift else 0.0
        made.append(
            Place(
                rank, job.ranks, f"node-{host + 1}", 4_000 + 1_000 * rank, index, per_host, DEVICES[job.device],
                Clock(offset, drift), groups,
            )
        )  # fmt: skip
    return made
