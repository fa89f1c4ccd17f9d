"""The program of a step of a model whose layers lie on several devices of one process: `.to("cuda:1")`.

A batch goes through the devices in turn, whole or in micro-batches. Launching waits for nothing, so that with several
micro-batches each device begins the next one while the others work. The backward pass takes them in reverse, as the
autograd engine does with the sum of their losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from simulator.hardware import DEVICES, US
from simulator.job import Job
from simulator.model import Shop
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
from simulator.replicating import APART
from simulator.training import key_of

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
