"""The program of a step on several devices: nn.DataParallel, layers apart in one process, pipelines of ranks.

DataParallel (torch/nn/parallel): the model is broadcast from the first device in every forward pass, each device
computes its part of the batch, the outputs are gathered, and the gradients are added up on the first device. The
threads that launch share one interpreter: they launch in turn.

Layers apart (`.to("cuda:1")`): a batch goes through the devices in turn, whole or in micro-batches. Launching waits for
nothing, so that with several micro-batches each device begins the next one while the others work. The backward pass
takes them in reverse, as the autograd engine does with the sum of their losses.

Pipelines as torch.distributed.pipelining runs them: GPipe and 1F1B, one stage a rank. Of several side by side, the
ranks of a stage all-reduce its gradients in buckets, from the backward pass of the last micro-batch on. What two
neighbours send each other at the same time is one batch and one kernel of NCCL, and the compute stream waits for each
batch (torch/distributed/pipelining/schedules.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from simulator.exchanges import Exchanges
from simulator.habits import optimizer_step, step_end, zero_grad
from simulator.hardware import DEVICES, US
from simulator.job import Job, pair
from simulator.model import Shop
from simulator.program import (
    APART,
    AUTOGRAD,
    COMPUTE,
    EXCHANGE,
    MAIN,
    Begin,
    Chunk,
    Copy,
    End,
    Exchange,
    Fetch,
    Function,
    Instruction,
    Kernel,
    Operator,
    Phase,
    Record,
    Spend,
    Step,
    Thread,
    WaitFor,
    key_of,
)

_BROADCAST = "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
_REDUCE = "ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
_COALESCED = 10 << 20  # bytes that go at once (torch/nn/parallel/_functions.py, Broadcast)


class Replicas:
    """Makes the steps of one process that drives several devices."""

    def __init__(self, job: Job, rank: int) -> None:  # noqa: ARG002 - there is one
        self.job = job
        self.model = replace(job.model, tokens=job.model.tokens // job.devices)
        self.shop = Shop(self.model, DEVICES[job.device])
        self._step: Step | None = None

    def step(self, number: int) -> Step:  # noqa: ARG002 - all steps are alike
        """Return a step by its number."""
        if self._step is None:
            self._step = Step(tuple(self._program()))
        return self._step

    @cached_property
    def _functions(self) -> list[tuple[str, Function]]:
        made = [("embedding", f) for f in self.shop.embedding(self.model.tokens)]
        for block in range(self.model.blocks):
            made += [(f"block{block}", f) for f in self.shop.block(self.model.tokens)]
        return made + [("head", f) for f in self.shop.head(self.model.tokens)]

    def _program(self) -> Iterator[Instruction]:
        job, host = self.job, self.job.host
        if job.loader is not None:
            yield Fetch()
        yield Copy("HtoD", job.batch.size, job.batch.memory, COMPUTE, key_of("batch"))
        yield Spend(job.script.before, "python", key_of("before"))
        yield Phase("forward")
        yield Begin("DataParallel.forward", 60 * US, key_of("wrapper"), "user_annotation")
        yield from self._everywhere("Broadcast", _BROADCAST)
        for device in range(job.devices):
            for module, f in self._functions:
                key = key_of(module, f.name, device)
                yield Operator(
                    (*f.outer, f.operator), f.kernels, key, host.before_op, host.after_op, device * APART + COMPUTE
                )
        yield from self._gather()
        yield End(20 * US)
        yield Phase("")
        yield Phase("backward")
        yield Thread(AUTOGRAD)
        for device in range(job.devices):
            for module, f in reversed(self._functions):
                key = key_of(module, f.name, "backward", device)
                yield Begin(f"autograd::engine::evaluate_function: {f.node}", host.backward_op, key)
                for n, (operator, kernel) in enumerate(f.backward):
                    stream = device * APART + COMPUTE
                    yield Operator((operator,), (kernel,), key + n, host.backward_op // 2, host.after_op // 2, stream)
                yield End(300, key)
        yield from self._everywhere("BroadcastBackward", _REDUCE)
        yield Thread(MAIN)
        yield Phase("")
        yield from optimizer_step(replace(job, model=self.model), self.shop)
        yield from step_end()
        yield from zero_grad(self.job)
        yield Spend(job.script.after, "python", key_of("after"))

    def _everywhere(self, name: str, kernel: str) -> Iterator[Instruction]:
        """Return a coalesced exchange of all parameters between the devices: one kernel a piece on each."""
        job, size = self.job, self.model.parameters * 4
        pieces = -(-size // _COALESCED)
        ns = 15_000 + round(size / pieces / job.gradients.bus * 1e9)
        yield Begin(name, 100 * US, key_of(name))
        for device in range(job.devices):
            yield Record(f"{name} {device}", device * APART + COMPUTE)
        for device in range(job.devices):
            stream = device * APART + COMPUTE
            for other in range(job.devices):
                yield WaitFor(f"{name} {other}", stream)
            made = (Kernel(kernel, ns, "communication", size // pieces),) * pieces
            yield Operator((), made, key_of(name, device), 5 * US, 2 * US, stream)
        yield End(20 * US)

    def _gather(self) -> Iterator[Instruction]:
        """Return the copies of all losses to the first device."""
        for device in range(1, self.job.devices):
            stream = device * APART + COMPUTE
            yield Operator(
                ("Gather", "aten::copy_"),
                (Kernel("Memcpy PtoP (Device -> Device)", 5_000, "copy", 4),),
                key_of("gather", device),
                8 * US,
                2 * US,
                stream,
            )
            yield Record(f"gathered {device}", stream)
            yield WaitFor(f"gathered {device}", COMPUTE)


_BUS = 20e9  # bytes/s from device to device


class Halves:
    """Makes the steps of one process whose model lies on several devices."""

    def __init__(self, job: Job, rank: int) -> None:  # noqa: ARG002 - there is one
        self.job = job
        self.model = replace(job.model, tokens=job.model.tokens // job.cut)
        self.shop = Shop(self.model, DEVICES[job.device])
        self._step: Step | None = None

    def step(self, number: int) -> Step:  # noqa: ARG002 - all steps are alike
        """Return a step by its number."""
        if self._step is None:
            self._step = Step(tuple(self._program()))
        return self._step

    def _functions(self, device: int) -> list[tuple[str, Function]]:
        """Return what a device computes of the forward pass: an equal part of the blocks."""
        devices, blocks, tokens = self.job.devices, self.model.blocks, self.model.tokens
        made = [("embedding", f) for f in self.shop.embedding(tokens)] if device == 0 else []
        for block in range(device * blocks // devices, (device + 1) * blocks // devices):
            made += [(f"block{block}", f) for f in self.shop.block(tokens)]
        return made + ([("head", f) for f in self.shop.head(tokens)] if device == devices - 1 else [])

    def _program(self) -> Iterator[Instruction]:
        job, host = self.job, self.job.host
        if job.loader is not None:
            yield Fetch()
        yield Copy("HtoD", job.batch.size, job.batch.memory, COMPUTE, key_of("batch"))
        yield Spend(job.script.before, "python", key_of("before"))
        yield Phase("forward")
        for piece in range(job.cut):
            for device in range(job.devices):
                if device:
                    yield from self._handed_over(f"forward {piece}", device - 1, device)
                for module, f in self._functions(device):
                    key = key_of(module, f.name, piece)
                    stream = device * APART + COMPUTE
                    yield Operator((*f.outer, f.operator), f.kernels, key, host.before_op, host.after_op, stream)
        yield Phase("")
        yield Phase("backward")
        yield Thread(AUTOGRAD)
        for piece in reversed(range(job.cut)):
            for device in reversed(range(job.devices)):
                if device < job.devices - 1:
                    yield from self._handed_over(f"backward {piece}", device + 1, device)
                for module, f in reversed(self._functions(device)):
                    key = key_of(module, f.name, "backward", piece)
                    yield Begin(f"autograd::engine::evaluate_function: {f.node}", host.backward_op, key)
                    for n, (operator, kernel) in enumerate(f.backward):
                        stream = device * APART + COMPUTE
                        yield Operator(
                            (operator,), (kernel,), key + n, host.backward_op // 2, host.after_op // 2, stream
                        )
                    yield End(300, key)
        yield Thread(MAIN)
        yield Phase("")
        yield Phase("optimizer")
        for device in range(job.devices):
            size = self.model.blocks * self.model.block_parameters // job.devices
            update = self.shop.moved("multi_tensor_apply_kernel<FusedAdam>", size, 7, 4)
            yield Operator(
                ("aten::_fused_adamw_",), (update,), key_of("adam", device), 40 * US, 5 * US, device * APART + COMPUTE
            )
        yield Phase("")
        yield Spend(job.script.after, "python", key_of("after"))

    def _handed_over(self, what: str, source: int, target: int) -> Iterator[Instruction]:
        """Return the copy of a micro-batch's activations, or their gradients, from one device to another."""
        size = self.model.tokens * self.model.hidden * self.shop.width
        moved = Kernel("Memcpy PtoP (Device -> Device)", 5_000 + round(size / _BUS * 1e9), "copy", size)
        stream = source * APART + COMPUTE
        yield Operator(("aten::to", "aten::copy_"), (moved,), key_of(what, source), 8 * US, 2 * US, stream)
        yield Record(f"{what} {source}", stream)
        yield WaitFor(f"{what} {source}", target * APART + COMPUTE)


class Stage:
    """Makes the steps of one rank of a pipeline."""

    def __init__(self, job: Job, rank: int) -> None:
        assert job.pipeline is not None
        self.job, self.rank, self.pipeline = job, rank, job.pipeline
        self.model = replace(job.model, tokens=job.model.tokens // self.pipeline.microbatches)
        self.shop = Shop(self.model, DEVICES[job.device])
        self.stage = rank % job.stages
        self.last = self.stage == job.stages - 1
        self.exchanges = Exchanges(job, rank, self.model.tokens)
        self._step: Step | None = None
        self._sends = 0

    def step(self, number: int) -> Step:  # noqa: ARG002 - all steps are alike
        """Return a step by its number."""
        if self._step is None:
            self._step = Step(tuple(self._program()))
        return self._step

    def _functions(self) -> list[tuple[str, Function]]:
        split = self.pipeline.split or (self.job.model.blocks // self.job.stages,) * self.job.stages
        first, tokens = sum(split[: self.stage]), self.model.tokens
        made = [("embedding", f) for f in self.shop.embedding(tokens)] if self.stage == 0 else []
        for block in range(first, first + split[self.stage]):
            made += [(f"block{block}", f) for f in self.shop.block(tokens)]
        return made + ([("head", f) for f in self.shop.head(tokens)] if self.last else [])

    def _program(self) -> Iterator[Instruction]:
        functions = self._functions()
        self.exchanges.begin(functions, exchange=True)
        if self.job.loader is not None:
            yield Fetch()
        yield Spend(self.job.script.before, "python", key_of("before"))
        yield Phase("forward")
        yield Phase("")
        yield Chunk("schedule", -1, -1)
        yield from (self._gpipe(functions) if self.pipeline.schedule == "GPipe" else self._one_by_one(functions))
        yield Chunk("")
        yield from self.exchanges.after_backward()
        own = replace(self.job, model=replace(self.model, blocks=max(len(functions) // 10, 1)))
        yield from optimizer_step(own, self.shop)
        yield from step_end()
        yield from zero_grad(own)
        yield Spend(self.job.script.after, "python", key_of("after"))

    # -- schedules

    def _gpipe(self, functions: Sequence[tuple[str, Function]]) -> Iterator[Instruction]:
        count = self.pipeline.microbatches
        for n in range(count):
            yield from self._exchange(-1, recv=True)
            yield from self._forward(functions, n)
            yield from self._exchange(+1, send=True, wait=False)
        for n in range(count):
            yield from self._exchange(+1, recv=True)
            yield from self._backward(functions, n)
            yield from self._exchange(-1, send=True, wait=False)

    def _one_by_one(self, functions: Sequence[tuple[str, Function]]) -> Iterator[Instruction]:
        count = self.pipeline.microbatches
        warm = min(count, self.job.stages - self.stage)
        for n in range(warm):
            yield from self._exchange(-1, recv=True)
            yield from self._forward(functions, n)
            if n < warm - 1:
                yield from self._exchange(+1, send=True, wait=False)
        forwards = warm
        for n in range(count):
            # The activations that are due go with the gradients that come back, and the other way round.
            yield from self._exchange(+1, send=n + warm - 1 < count, recv=True)
            yield from self._backward(functions, n)
            if forwards < count:
                yield from self._exchange(-1, send=True, recv=True)
                yield from self._forward(functions, forwards)
                forwards += 1
            else:
                yield from self._exchange(-1, send=True, wait=n == count - 1)

    def _exchange(self, way: int, send: bool = False, recv: bool = False, wait: bool = True) -> Iterator[Instruction]:
        """Return what goes to and comes from the next stage (+1) or the one before (−1); nothing at the ends."""
        peer = self.rank + way
        if not 0 <= self.stage + way < self.job.stages:
            return
        kind = "send_recv" if send and recv else "send" if send else "recv"
        key, self._sends = key_of(kind, self._sends), self._sends + 1
        elements = self.model.tokens * self.model.hidden
        exchange = Exchange(
            kind, pair(min(self.rank, peer)), elements, self.model.activations, EXCHANGE, key, peer, within="0"
        )
        name = f"p2p{self._sends}"
        yield from self._called(exchange)
        yield Record(f"{name} ready", COMPUTE)
        yield WaitFor(f"{name} ready", EXCHANGE)
        yield exchange
        yield Record(f"{name} done", EXCHANGE)
        for _ in range(3):
            yield End(1 * US, key)
        if wait:
            yield WaitFor(f"{name} done", COMPUTE)

    def _called(self, exchange: Exchange) -> Iterator[Instruction]:
        """Return the calls around an exchange, three of which stay open. A batch calls its send and its receive before.

        As ProcessGroupNCCL does: within a batch each only notes what it is of, and the end of the batch launches.
        """
        key, kind, peer = exchange.key, exchange.kind, exchange.peer
        if kind == "send_recv":
            for one, operator in (("send", "c10d::send"), ("recv", "c10d::recv_")):
                yield Begin(operator, 1 * US, key)
                yield Begin("record_param_comms", 1 * US, key, args={"exchange": replace(exchange, kind=one)})
                yield End(0, key)
                yield End(1 * US, key)
            yield Begin("c10d::_end_coalescing", 2 * US, key)
            yield Begin("record_param_comms", 1 * US, key)
            yield Begin("nccl:coalesced", 1 * US, key, "user_annotation")
            return
        yield Begin("c10d::send" if kind == "send" else "c10d::recv_", 6 * US, key)
        yield Begin("record_param_comms", 3 * US, key, args={"exchange": exchange})
        arrow = "->" if kind == "send" else "<-"
        yield Begin(f"nccl:{kind} {self.rank}{arrow}{peer}", 1 * US, key, "user_annotation")

    # -- chunks

    def _forward(self, functions: Sequence[tuple[str, Function]], n: int) -> Iterator[Instruction]:
        host = self.job.host
        yield Chunk("forward", self.stage, n)
        yield Spend(40 * US, "python", key_of("chunk", n))
        for module, f in functions:
            key = key_of(module, f.name, n)
            yield Operator((*f.outer, f.operator), f.kernels, key, host.before_op, host.after_op)
        yield Chunk("")

    def _backward(self, functions: Sequence[tuple[str, Function]], n: int) -> Iterator[Instruction]:
        host = self.job.host
        yield Phase("backward")
        yield Chunk("backward", self.stage, n)
        yield Spend(40 * US, "python", key_of("chunk back", n))
        yield Thread(AUTOGRAD)
        for module, f in reversed(functions):
            key = key_of(module, f.name, "backward", n)
            yield Begin(f"autograd::engine::evaluate_function: {f.node}", host.backward_op, key)
            for m, (operator, kernel) in enumerate(f.backward):
                yield Operator((operator,), (kernel,), key + m, host.backward_op // 2, host.after_op // 2)
            yield End(300, key)
            if n == self.pipeline.microbatches - 1:
                yield from self.exchanges.gradient(module, f.name, f.parameters)
        yield Thread(MAIN)
        yield Chunk("")
        yield Phase("")
