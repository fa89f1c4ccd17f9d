"""The program of a training step: fetch, copy, forward, backward with its exchange, optimizer, and the script's habits.

What PyTorch launches where is as in its own sources: DistributedDataParallel hands a bucket to NCCL's stream as soon as
its gradients are there, and the compute stream waits for all buckets behind the backward pass; an operator of the
backward pass runs in a thread of the autograd engine while the training thread waits for it.

A block is a module, and so is each function of it that has parameters. What is for which module is noted on the device
work itself (Belongs), apart from all that a trace says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain

from simulator import habits
from simulator.exchanges import VARIANTS, Exchanges, got
from simulator.habits import optimizer_step, step_end, zero_grad
from simulator.hardware import DEVICES, US
from simulator.job import Job, Tables
from simulator.model import Shop
from simulator.program import (
    AUTOGRAD,
    COMPUTE,
    HIDDEN,
    MAIN,
    SIDE,
    Allocate,
    Args,
    Begin,
    Belongs,
    Copy,
    End,
    Fetch,
    Function,
    Graph,
    HostFunction,
    Instruction,
    Kernel,
    Line,
    Operator,
    Phase,
    Record,
    Spend,
    Stall,
    Step,
    Synchronize,
    Thread,
    WaitFor,
    key_of,
)

OUTSIDE = "(outside of modules)"
ACCUMULATE = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"


class Layers:
    """Makes the numbers of a model's functions, and their ranges where its modules have names."""

    def __init__(self, functions: Sequence[tuple[str, Function]], named: bool) -> None:
        self._named = named
        self._number = {(module, f.name): n for n, (module, f) in enumerate(functions)}
        self._open = ""

    def path(self, module: str, f: Function) -> str:
        """Return the path of the module that a function is of."""
        return f"{module}.{f.name}" if f.parameters else module

    def args(self, module: str, f: Function, kind: str, told: Args | None = None) -> Args:
        """Return what a function's operator ("made") or its backward function ("of") says, with what it said before."""
        return {**(told or {}), kind: self._number[module, f.name]}

    def model(self) -> Iterator[Instruction]:
        """Enter the model."""
        if self._named:
            yield _range("", "Transformer")

    def enter(self, module: str, f: Function) -> Iterator[Instruction]:
        """Enter the module of a function, which is not left before another one is entered."""
        yield Belongs(self.path(module, f), "forward")
        if not self._named:
            return
        if module != self._open:
            yield from self.leave_all()
            self._open = module
            yield _range(module, "Block")
        if f.parameters:
            yield _range(self.path(module, f), "Linear")

    def leave(self, f: Function) -> Iterator[Instruction]:
        """Leave a function's own module."""
        if self._named and f.parameters:
            yield End(500)

    def leave_all(self) -> Iterator[Instruction]:
        """Leave the block that was entered last."""
        if self._named and self._open:
            yield End(500)
        self._open = ""

    def leave_model(self) -> Iterator[Instruction]:
        """Leave the model."""
        if self._named:
            yield End(500)

    def accumulate(self, made: Iterator[Instruction]) -> Iterator[Instruction]:
        """Return what is done where a gradient is added up, in the engine's function that does it."""
        if self._named:
            yield Begin(ACCUMULATE, 1 * US)
        yield from made
        if self._named:
            yield End(500)


def _range(path: str, kind: str) -> Begin:
    return Begin(f"nn.Module: {path} ({kind})", 500, category="module")


_SEGMENTS = 6  # that the allocator gives back and takes again when memory has run out


class Training:
    """Makes the steps of one rank."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank
        self.shop = Shop(job.model, DEVICES[job.device], dict(job.clocks).get(rank, 1.0))
        self.tokens = job.tokens_of(rank)
        self.exchanges = Exchanges(job, rank, self.tokens)
        self._made: dict[object, Step] = {}
        self._functions: dict[int, list[tuple[str, Function]]] = {}

    def step(self, number: int) -> Step:
        """Return a step by its number."""
        job, pauses = self.job, self.job.pauses
        kind, first, last = "train", number == 0, False
        if job.epochs.steps:
            at = number % (job.epochs.steps + job.epochs.validation)
            kind = "train" if at < job.epochs.steps else "validation"
            first, last = at == 0, at == job.epochs.steps - 1
        stalls = tuple(
            bool(length) and number > 0 and number % every == every - 1
            for length, every in (
                (pauses.garbage, pauses.garbage_every),
                (pauses.checkpoint, pauses.checkpoint_every),
                (pauses.compile, pauses.compile_every),
                (pauses.retry, pauses.retry_every),
            )
        )
        reads = bool(job.script.items) and number % job.script.every == job.script.every - 1
        reads &= not job.script.readers or self.rank in job.script.readers
        if kind == "train" and job.script.skips and number % job.script.skips == job.script.skips - 1:
            kind = "other"
        self.exchanges.number = number % VARIANTS if job.routing else 0
        opens = number == 0 and job.script.opening > 0
        flavour = (kind, first, last, stalls, reads, opens, self.exchanges.number)
        if flavour not in self._made:
            if kind == "train":
                program = self._train(stalls, reads, opens)
            else:
                program = self._validate() if kind == "validation" else self._skip()
            self._made[flavour] = Step(tuple(program), kind, first, last)
        return self._made[flavour]

    # -- parts of the model

    @property
    def functions(self) -> list[tuple[str, Function]]:
        """The model's functions in order, each with the module that it is of, in the step that is being made."""
        number = self.exchanges.number
        if number not in self._functions:
            self._functions[number] = self._of_step(number)
        return self._functions[number]

    def _of_step(self, number: int) -> list[tuple[str, Function]]:
        job = self.job
        made = [("embedding", f) for f in self.shop.embedding(self.tokens)]
        if job.tables.on == "device":
            made += [("tables", f) for f in habits.lookups_on_device(self.shop, job.tables)]
        for block in (f"block{n}" for n in range(job.model.blocks)):
            routed = sum(got(job, self.rank, block, number)) if job.routing else None
            made += [(block, f) for f in self.shop.block(self.tokens, routed)]
        made += [("cell", f) for f in self.shop.recurrent(self.tokens)]
        return made + [("head", f) for f in self.shop.head(self.tokens)]

    @cached_property
    def layers(self) -> Layers:
        """The model's modules."""
        return Layers(self.functions, self.job.modules)

    def _forward(self, functions: Sequence[tuple[str, Function]]) -> Iterator[Instruction]:
        host = self.job.host
        for module, f in functions:
            yield from self.exchanges.before_forward(module)
            key = key_of(module, f.name)
            shapes = {"shapes": f.shapes, "dtype": f.dtype} if f.shapes else None
            args = self.layers.args(module, f, "made", shapes)
            yield from self.layers.enter(module, f)
            names = (*f.outer, f.operator)
            yield Operator(names, f.kernels, key, host.before_op, host.after_op, args=args, views=host.views)
            yield from self.layers.leave(f)
            yield from self.exchanges.after_function(module, f.name, "forward")
        yield from self.layers.leave_all()

    def _backward(self, functions: Sequence[tuple[str, Function]]) -> Iterator[Instruction]:
        host = self.job.host
        recomputes = self.job.memory is not None and self.job.memory.checkpoints
        again = ""
        for module, f in reversed(functions):
            yield from self.exchanges.before_backward(module)
            if recomputes and module.startswith("block") and module != again:
                again = module
                yield from self._forward([g for g in functions if g[0] == module])
            if not f.node:
                continue
            engine = f"autograd::engine::evaluate_function: {f.node}"
            key = key_of(module, f.name, "backward")
            yield Belongs(self.layers.path(module, f), "backward")
            yield Begin(engine, host.backward_op, key, args=self.layers.args(module, f, "of"))
            yield Begin(f.node, 500, key)
            for n, (operator, kernel) in enumerate(f.backward):
                if self.exchanges.busy and self.job.gradients.slowdown:
                    kernel = replace(kernel, ns=round(kernel.ns * (1 + self.job.gradients.slowdown)))
                before, after = host.backward_op // 2, host.after_op // 2
                yield Operator((operator,), (kernel,), key + n, before, after, views=host.views)
            yield End(300, key)
            yield End(300, key)
            yield from self.exchanges.after_function(module, f.name, "backward")
            if f.parameters:
                hook = habits.hook(self.job, self.shop, key_of(module, f.name, "hook"))
                yield from self.layers.accumulate(chain(hook, self.exchanges.gradient(module, f.name, f.parameters)))
        yield from self.layers.accumulate(self.exchanges.after_backward())

    # -- steps

    def _train(self, stalls: tuple[bool, ...], reads: bool, opens: bool) -> Iterator[Instruction]:
        """Return one step of the optimizer, and the batches before it: the recorder's steps end there."""
        job = self.job
        _, checkpoint, *_ = stalls
        if job.loader is None:
            yield from self._behind(reads, checkpoint)
        for left in reversed(range(job.gradients.accumulate)):
            yield from self._on_batch(stalls, not left, opens)
        if job.loader is not None:
            yield from self._behind(reads, checkpoint)

    def _on_batch(self, stalls: tuple[bool, ...], steps: bool, opens: bool) -> Iterator[Instruction]:
        """Return what is done with one batch; `steps`: with the optimizer's step."""
        job, script = self.job, self.job.script
        garbage, _, compiles, retries = stalls
        yield Belongs(OUTSIDE, "other")
        if job.loader is not None:
            yield Line("iteration")
            yield Fetch()
        yield Line("batch")
        if sleep := dict(job.sleeps).get(self.rank, 0):
            yield Spend(sleep, "sleep", key_of("sleep"))
        yield from self._batch()
        yield Spend(script.before, "python", key_of("before"))
        if compiles:
            yield Stall("compilation", job.pauses.compile, key_of("compile"), "train.py:12 forward", "size mismatch")
        if script.captured == "all":
            yield from self._replay()
        else:
            yield from self._pass(steps, garbage, retries, opens)

    def _behind(self, reads: bool, checkpoint: bool) -> Iterator[Instruction]:
        """Return what the script does behind the optimizer's step."""
        job, script = self.job, self.job.script
        yield Belongs(OUTSIDE, "other")
        if script.captured != "all":
            yield from step_end()
            yield from habits.lap(job, "step")
            yield Line("zero_grad")
            yield from zero_grad(job)
        yield from habits.average(job, self.shop)
        yield from habits.accuracy_value(job, self.shop)
        yield Line("values")
        if reads:
            for n in range(script.items):
                yield from habits.item(job, key_of("item", n))
        for n in range(script.masks):
            yield from self._mask(n)
        if script.waits:
            yield Synchronize("device")
        if checkpoint:
            yield Line("checkpoint")
            yield Stall("checkpoint", job.pauses.checkpoint, key_of("save"), "checkpoint.pt", blocks=True)
        yield Line("bookkeeping")
        yield Spend(script.after, "python", key_of("after"))

    def _pass(self, steps: bool, garbage: bool, retries: bool, opens: bool) -> Iterator[Instruction]:
        """Return forward, backward and the optimizer's step."""
        job, pauses = self.job, self.job.pauses
        self.exchanges.begin(self.functions, exchange=steps or not job.gradients.seldom)
        yield Line("forward")
        yield Phase("forward")
        if opens:
            yield Spend(job.script.opening, "python", key_of("opening"))
        if self.exchanges.wrapper:
            yield Begin(self.exchanges.wrapper, 30 * US, key_of("wrapper"), "user_annotation")
        yield from self.layers.model()
        yield from self.exchanges.before_all()
        yield from self._waiting()
        on_host = job.tables if job.tables.on == "host" else Tables()
        yield from habits.lookups_on_host(on_host)
        half = len(self.functions) // 2 if garbage or retries else len(self.functions)
        if job.script.captured:
            yield self._graph(self._forward(self.functions), "forward")
            half = len(self.functions)
        yield from self._forward(self.functions[:half] if not job.script.captured else ())
        if garbage:
            yield Stall("garbage_collection", pauses.garbage, key_of("garbage"))
        if retries:
            yield from self._retry()
        yield from self._forward(self.functions[half:])
        yield from self.layers.leave_model()
        if self.exchanges.wrapper:
            yield from self.exchanges.after_forward()
            yield End(10 * US)
        yield Phase("")
        yield from habits.loss_value(job)
        yield from habits.lap(job, "forward")
        yield Line("backward")
        yield Phase("backward")
        yield Spend(40 * US, "launch", key_of("backward"))
        yield Thread(AUTOGRAD)
        if job.script.captured:
            yield self._graph(self._backward(self.functions), "backward")
        else:
            yield from self._backward(self.functions)
        yield from habits.gradients_on_host(on_host)
        yield Thread(MAIN)
        yield Spend(15 * US, "launch", key_of("backward", "end"))
        yield Phase("")
        yield from habits.lap(job, "backward")
        yield from self.exchanges.by_script()
        yield Belongs(OUTSIDE, "other")
        yield from habits.norms(job, self.shop)
        if steps:
            yield Line("step")
            yield Belongs(OUTSIDE, "optimizer")
            yield from optimizer_step(job, self.shop)

    def _replay(self) -> Iterator[Instruction]:
        """Return the whole step as one captured graph: the kernels are the same, launches and their Python are gone."""
        yield Line("replay")
        yield Phase("replay")
        yield Spend(30 * US, "launch", key_of("replay"))
        everything = chain(
            self._forward(self.functions),
            self._backward(self.functions),
            optimizer_step(self.job, self.shop),
        )
        yield self._graph(everything, "all")

    def _graph(self, made: Iterable[Instruction], name: str) -> Graph:
        """Return the graph that capturing these instructions makes; one of its nodes may wait."""
        nodes = [k for it in made if isinstance(it, Operator) for k in it.kernels]
        if self.job.script.graph_waits and name != "backward":
            nodes.insert(len(nodes) // 2, Kernel("", self.job.script.graph_waits, "wait"))
        return Graph(tuple(nodes), key_of("graph", name))

    def _skip(self) -> Iterator[Instruction]:
        """Return a step that the script leaves at once."""
        yield Line("iteration")
        if self.job.loader is not None:
            yield Fetch()
        yield Spend(100 * US, "python", key_of("skip"))

    def _validate(self) -> Iterator[Instruction]:
        yield Line("validation")
        yield Fetch(HIDDEN)
        yield from self._batch()
        yield Phase("forward")
        yield from self._forward(self.functions)
        yield Phase("")
        yield from habits.item(self.job, key_of("item", 0))

    # -- habits

    def _batch(self) -> Iterator[Instruction]:
        batch = self.job.batch
        if not batch.size:
            return
        key = key_of("batch")
        stream = SIDE if batch.ahead else COMPUTE
        if batch.ahead:
            yield WaitFor("batch")
        for name in ("aten::to", "aten::_to_copy", "aten::copy_"):
            yield Begin(name, 2 * US, key)
        yield Copy("HtoD", batch.size, batch.memory, stream, key)
        if batch.waits:
            yield Synchronize("stream", stream)
        for _ in range(3):
            yield End(1 * US, key)
        if batch.ahead:
            yield Record("batch", SIDE)

    def _mask(self, n: int) -> Iterator[Instruction]:
        """Return values[mask]: the host must know how many there are before it can go on."""
        key = key_of("mask", n)
        count = Kernel(
            "void at_cuda_detail::cub::DeviceReduceKernel<at_cuda_detail::cub::DeviceReducePolicy<int> >", 6 * US
        )
        select = Kernel(
            "void at_cuda_detail::cub::DeviceSelectSweepKernel<at_cuda_detail::cub::DispatchSelectIf<int> >", 8 * US
        )
        gather = Kernel("void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel>", 12 * US)
        yield Begin("aten::index", 4 * US, key)
        yield Begin("aten::nonzero", 3 * US, key)
        yield Operator((), (count,), key, 1 * US, 500)
        yield Copy("DtoH", 8, self.job.script.item_memory, COMPUTE, key)
        yield Synchronize("stream")
        yield Operator((), (select,), key, 1 * US, 500)
        yield End(1 * US, key)
        yield Operator((), (gather,), key, 1 * US, 500)
        yield End(1 * US, key)

    def _waiting(self) -> Iterator[Instruction]:
        """Return what makes queued work wait: a host function in the stream, or in another one before an event."""
        script = self.job.script
        if script.waits_on_host:
            yield HostFunction(script.waits_on_host, key_of("host function"))
        if script.waits_on_stream:
            yield Record("begun", COMPUTE)
            yield WaitFor("begun", SIDE)
            yield HostFunction(script.waits_on_stream, key_of("other stream"), SIDE)
            yield Record("other", SIDE)
            yield WaitFor("other", COMPUTE)

    def _retry(self) -> Iterator[Instruction]:
        """Return an allocation that succeeds only after the cache was emptied."""
        part = self.job.pauses.retry // (2 * _SEGMENTS)
        for n in range(_SEGMENTS):
            yield Allocate("cudaFree", part, True, key_of("free", n))
        for n in range(_SEGMENTS):
            yield Allocate("cudaMalloc", part, False, key_of("malloc", n))
