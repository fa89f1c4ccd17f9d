"""The program of a pipeline stage, as torch.distributed.pipelining runs it: GPipe and 1F1B, one stage a rank.

Of several pipelines side by side, the ranks of a stage all-reduce its gradients in buckets, from the backward pass of
the last micro-batch on.

What two neighbours send each other at the same time is one batch and one kernel of NCCL, and the compute stream waits
for each batch (torch/distributed/pipelining/schedules.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from simulator.exchanges import Exchanges
from simulator.groups import pair
from simulator.hardware import DEVICES, US
from simulator.job import Job, Pipeline
from simulator.model import Shop
from simulator.optimizers import optimizer_step, step_end, zero_grad
from simulator.program import (
    AUTOGRAD,
    COMPUTE,
    EXCHANGE,
    MAIN,
    Begin,
    Chunk,
    End,
    Exchange,
    Fetch,
    Function,
    Instruction,
    Operator,
    Phase,
    Record,
    Spend,
    Step,
    Thread,
    WaitFor,
)
from simulator.training import key_of


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
        yield from optimizer_step(own, self.shop, key_of)
        yield from step_end(key_of)
        yield from zero_grad(own, key_of)
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


def bubble(pipeline: Pipeline, stages: int) -> float:
    """Return the idle share of a step that GPipe and 1F1B leave: (p − 1) ÷ (m + p − 1)."""
    return (stages - 1) / (pipeline.microbatches + stages - 1)
