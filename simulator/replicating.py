"""The program of a step under nn.DataParallel: one process drives several devices (torch/nn/parallel).

The model is broadcast from the first device in every forward pass, each device computes its part of the batch, the
outputs are gathered, and the gradients are added up on the first device. The threads that launch share one interpreter:
they launch in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from simulator.hardware import DEVICES, US
from simulator.job import Job
from simulator.model import Shop
from simulator.optimizers import optimizer_step, step_end, zero_grad
from simulator.program import (
    AUTOGRAD,
    COMPUTE,
    MAIN,
    Begin,
    Copy,
    End,
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
)
from simulator.training import key_of

APART = 1_000  # what tells the streams of the second device from those of the first

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
        yield from optimizer_step(replace(job, model=self.model), self.shop, key_of)
        yield from step_end(key_of)
        yield from zero_grad(self.job, key_of)
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
