"""How a step exchanges gradients and parameters: DDP's buckets, the script's own all-reduces, FSDP's shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from simulator.hardware import US
from simulator.job import WORLD, Job, data_group, tensor_group
from simulator.program import (
    COMPUTE,
    EXCHANGE,
    Begin,
    End,
    Exchange,
    Function,
    Instruction,
    Kernel,
    Operator,
    Record,
    Spend,
    WaitFor,
    key_of,
)

# Steps differ: after so many they begin again, so that few programs are made.
VARIANTS = 6


@lru_cache(256)
def sent(job: Job, module: str, step: int) -> tuple[tuple[int, ...], ...]:
    """Return the tokens that each rank sends to each, rank by rank, of one layer in one step; none are lost.

    `Job.routing` are the ranks' mean shares, of which each layer and step has its own, some per cent apart.
    """
    rng = np.random.default_rng((job.seed, 83, step % VARIANTS, int(module.removeprefix("block"))))
    shares = np.array(job.routing) * rng.lognormal(0.0, job.routing_spread, job.ranks)
    parts = []
    for rank in range(job.ranks):
        mine = shares * rng.lognormal(0.0, 0.02, job.ranks)
        ends = np.rint(np.cumsum(mine / mine.sum()) * job.tokens_of(rank)).astype(int)
        parts.append(tuple(int(n) for n in np.diff(ends, prepend=0)))
    return tuple(parts)


def given(job: Job, rank: int, module: str, step: int) -> tuple[int, ...]:
    """Return the tokens that a rank sends to each rank's experts."""
    return sent(job, module, step)[rank]


def got(job: Job, rank: int, module: str, step: int) -> tuple[int, ...]:
    """Return the tokens that a rank's experts get from each rank."""
    return tuple(row[rank] for row in sent(job, module, step))


# DDP's first bucket is small, so that the exchange begins early (torch/nn/parallel/distributed.py).
FIRST_BUCKET = 1 << 20

CALLS = {
    "all_reduce": "allreduce_",
    "all_gather": "_allgather_base_",
    "reduce_scatter": "_reduce_scatter_base_",
    "all_to_all": "alltoall_base_",
    "broadcast": "broadcast_",
}
MARKS = {
    "all_reduce": "all_reduce",
    "all_gather": "_all_gather_base",
    "reduce_scatter": "_reduce_scatter_base",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
}

# Each process group has a stream of its own on each rank.
TENSOR, EXPERTS, REPLICAS = 28, 32, 36

# What looking through the autograd graph for unused parameters takes for each tensor: an assumption.
_SEARCH = 9 * US


class Exchanges:
    """What one rank exchanges within a step; nothing where it is alone."""

    def __init__(self, job: Job, rank: int, tokens: int) -> None:
        self.job, self.rank = job, rank
        self._group = data_group(job, rank)
        self._stream = EXCHANGE if job.pipeline is None else REPLICAS
        self._activations = tokens * job.model.hidden
        self.how = job.gradients.how if job.ranks > 1 and self._group else ""
        self.wrapper = "DistributedDataParallel.forward" if self.how == "ddp" else ""
        self._modules: list[str] = []
        self._functions: dict[str, list[Function]] = {}
        self._gathered: set[str] = set()
        self._bucket, self._count = 0, 0
        self._on = True
        self.number = 0  # of the step, as far as steps differ in where tokens go

    @property
    def busy(self) -> bool:
        """Whether buckets are exchanged while this is launched."""
        return self.how == "ddp" and self._on and self._count > 0

    def begin(self, functions: Sequence[tuple[str, Function]], exchange: bool) -> None:
        """Begin a step; `exchange`: its gradients are exchanged."""
        self._on = exchange
        self._modules = list(dict.fromkeys(module for module, _ in functions))
        self._functions = {m: [f for module, f in functions if module == m] for m in self._modules}
        self._gathered = set()
        self._bucket = self._count = 0

    def issue(
        self, kind: str, elements: int, name: str, dtype: str, after: str = "", group: str = "", stream: int = EXCHANGE,
        pieces: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    ) -> Iterator[Instruction]:  # fmt: skip
        """Return the issue of a collective on NCCL's stream, once the compute stream (or event `after`) is there."""
        key = key_of(name)
        exchange = Exchange(kind, group or self._group, elements, dtype, stream, key, give=pieces[0], take=pieces[1])
        yield Begin(f"c10d::{CALLS[kind]}", 8 * US, key)
        yield Begin("record_param_comms", 4 * US, key, args={"exchange": exchange})
        yield Begin(f"nccl:{MARKS[kind]}", 2 * US, key, "user_annotation")
        if not after:
            yield Record(f"{name} ready", COMPUTE)
        yield WaitFor(after or f"{name} ready", stream)
        yield exchange
        yield Record(f"{name} done", stream)
        for _ in range(3):
            yield End(1 * US, key)

    # -- layers that several ranks share

    def after_function(self, module: str, name: str, phase: str) -> Iterator[Instruction]:
        """Return what ranks that share a layer exchange behind one of its functions, which the next one waits for.

        Tensor parallel: the outputs of a layer's second product are added up, and in the backward pass the gradients of
        the first one's inputs (Shoeybi et al., Megatron-LM, 2019). Experts: tokens go to their expert and come back.
        """
        job, dtype = self.job, self.job.model.activations
        pieces: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        out, home = ("norm2", "down") if phase == "forward" or not job.routing else ("add2", "up")
        if job.tensor > 1 and name in (("proj", "down") if phase == "forward" else ("qkv", "up")):
            kind, group, stream, how = "all_reduce", tensor_group(job, self.rank), TENSOR, "tensor"
        elif job.experts and job.ranks > 1 and name in (out, home):
            kind, group, stream, how = "all_to_all", WORLD, EXPERTS, "experts"
            if job.routing:
                at = (job, self.rank, module, self.number)
                pieces = (given(*at), got(*at)) if name == out else (got(*at), given(*at))
        else:
            return
        label = f"{how} {phase} {module}.{name}"
        sent = sum(pieces[0]) * job.model.hidden or self._activations
        yield from self.issue(kind, sent, label, dtype, group=group, stream=stream, pieces=pieces)
        yield WaitFor(f"{label} done")

    def before_all(self) -> Iterator[Instruction]:
        """Return what DDP does before the forward pass: it makes the model's buffers those of the first rank."""
        if self.how == "ddp" and self.job.gradients.buffers:
            yield from self.issue("broadcast", 4_096, "buffers", "float32")
            yield WaitFor("buffers done")

    # -- DDP

    def gradient(self, module: str, name: str, parameters: int) -> Iterator[Instruction]:
        """Take the gradients of a function's parameters."""
        if self.how == "fsdp" and self._functions[module][0].name == name:
            yield from self._scatter(module)
        if self.how != "ddp" or not self._on:
            return
        self._bucket += parameters * 4
        if self._bucket >= (self.job.gradients.bucket if self._count else min(FIRST_BUCKET, self.job.gradients.bucket)):
            yield from self._reduce()

    def _reduce(self) -> Iterator[Instruction]:
        gradients = self.job.gradients
        elements, self._bucket = self._bucket // 4, 0
        name = f"bucket{self._count}"
        self._count += 1
        if gradients.dtype != "float32":
            yield self._cast(elements, name)
        yield from self.issue("all_reduce", elements, name, gradients.dtype, stream=self._stream)

    def _cast(self, elements: int, name: str) -> Instruction:
        """Return the kernel of a compression hook, which makes 16 bits of 32."""
        ns = 3_000 + round(elements * 6 / 1.4e12 * 1e9)
        made = Kernel("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", ns)
        return Operator(("aten::to", "aten::copy_"), (made,), key_of(f"cast {name}"), 3 * US, 1 * US)

    def after_forward(self) -> Iterator[Instruction]:
        """Return what DDP does behind the forward pass: it may look for unused parameters."""
        if self.job.gradients.search and self._on:
            name = "torch.distributed.ddp.reducer::search_unused_parameters"
            yield Begin(name, 0, category="user_annotation")
            yield Spend(self.job.model.tensors * _SEARCH, "launch", 5)
            yield End()

    def after_backward(self) -> Iterator[Instruction]:
        """Return the end of the backward pass: the last bucket, and the compute stream's wait for all of them."""
        if self.how == "fsdp" and self._on:
            yield WaitFor(f"scatter {self._modules[0]} done")
        if self.how != "ddp" or not self._on:
            return
        if self._bucket:
            yield from self._reduce()
        if self.job.gradients.search:
            yield from self.issue("all_reduce", self.job.model.tensors, "used", "int32")
            yield WaitFor("used done")
        for n in range(self._count):
            yield WaitFor(f"bucket{n} done")
            if self.job.gradients.dtype != "float32":
                yield self._cast(self.job.gradients.bucket // 4, f"back{n}")

    # -- by the script, behind the backward pass

    def by_script(self) -> Iterator[Instruction]:
        """Return all-reduces that the script makes of each tensor, waiting for each."""
        if self.how != "after" or not self._on:
            return
        if self.job.gradients.flat:
            elements = sum(f.parameters for functions in self._functions.values() for f in functions)
            yield from self.issue("all_reduce", elements, "all", self.job.gradients.dtype)
            yield WaitFor("all done")
            return
        for module, functions in reversed(self._functions.items()):
            for f in reversed(functions):
                if f.parameters:
                    name = f"{module}.{f.name}"
                    yield from self.issue("all_reduce", f.parameters, name, self.job.gradients.dtype)
                    yield WaitFor(f"{name} done")

    # -- FSDP

    def before_forward(self, module: str) -> Iterator[Instruction]:
        """Return the gathering of a module's parameters, before its first function."""
        yield from self._gather(module, "forward")

    def before_backward(self, module: str) -> Iterator[Instruction]:
        """Return the same for the backward pass."""
        yield from self._gather(module, "backward")

    def _gather(self, module: str, phase: str) -> Iterator[Instruction]:
        name = f"gather {phase} {module}"
        if self.how != "fsdp" or name in self._gathered:
            return
        self._gathered.add(name)
        order = self._modules if phase == "forward" else self._modules[::-1]
        behind = {b: a for a, b in pairwise(order)}
        # One module is gathered while the one before it computes, and no more are: their memory is wanted.
        yield Record(f"computed {phase} {module}", COMPUTE)
        before = behind.get(module)
        after = f"computed {phase} {before}" if before else ""
        elements = sum(f.parameters for f in self._functions[module])
        yield from self.issue("all_gather", elements, name, "bfloat16", after)
        yield WaitFor(f"{name} done")

    def _scatter(self, module: str) -> Iterator[Instruction]:
        if self._on:
            elements = sum(f.parameters for f in self._functions[module])
            yield from self.issue("reduce_scatter", elements, f"scatter {module}", "float32")
