"""What a simulated job's training step asks of its allocator, tensor by tensor, and what dlprof would count of that.

As PyTorch trains the transformer of model.py: parameters in float32 (under autocast with copies of the matrices in
16 bits), activations that each function saves until its backward pass, gradients that are made as the backward pass
goes, and dropped when the optimizer has stepped. Checkpointed blocks save their input and compute the rest again.

The allocator caches as PyTorch's does for CUDA, by the rules of c10/cuda/CUDACachingAllocator.cpp: sizes are multiples
of 512 bytes; up to 1 MiB is cut from segments of 2 MiB, below 10 MiB from segments of 20 MiB, larger requests have
segments of their own in multiples of 2 MiB; the smallest free block that is large enough serves a request; what is left
of a block is split off where it is at least 512 bytes (of the small) or more than 1 MiB (of the large); neighbours that
are free are joined; and where the device has no more, all segments that are free are given back before the request
fails.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from simulator.hardware import DEVICES
from simulator.job import Job
from simulator.model import Model
from simulator.program import WIDTHS

ROUND = 512
SMALL, SMALL_SEGMENT = 1 << 20, 2 << 20
MIDDLE, MIDDLE_SEGMENT = 10 << 20, 20 << 20
LARGE_ROUND = 2 << 20


class OutOfMemoryError(Exception):
    """A request that could not be served; with its bytes."""

    def __init__(self, size: int, part: str) -> None:
        super().__init__(f"CUDA out of memory. Tried to allocate {size} bytes.")
        self.size, self.part = size, part


@dataclass
class _Block:
    segment: int
    start: int
    size: int
    small: bool
    part: str = ""  # "": free
    before: _Block | None = None
    after: _Block | None = None


@dataclass
class Allocator:
    """Serves requests, and counts; all in bytes. `total`: that the device leaves PyTorch."""

    total: int
    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0
    retries: int = 0
    device_allocs: int = 0
    device_frees: int = 0
    at_peak: dict[str, int] = field(default_factory=dict)  # part → bytes, when most was allocated
    _parts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _free: list[_Block] = field(default_factory=list)
    _segments: int = 0

    def take(self, size: int, part: str) -> _Block:
        """Serve a request; raise OutOfMemoryError where nothing is left."""
        rounded = max(-(-size // ROUND), 1) * ROUND
        small = rounded <= SMALL
        fitting = [b for b in self._free if b.small == small and b.size >= rounded]
        block = (
            min(fitting, key=lambda b: (b.size, b.segment, b.start)) if fitting else self._segment(rounded, small, part)
        )
        self._free.remove(block)
        left = block.size - rounded
        if left >= ROUND if small else left > SMALL:
            rest = _Block(block.segment, block.start + rounded, left, small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, rounded
            self._free.append(rest)
        block.part = part
        self.allocated += block.size
        self._parts[part] += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
            self.at_peak = dict(self._parts)
        return block

    def give(self, block: _Block) -> None:
        """Free a block, and join it with free neighbours."""
        self.allocated -= block.size
        self._parts[block.part] -= block.size
        block.part = ""
        before, after = block.before, block.after
        if after is not None and after in self._free:
            self._free.remove(after)
            block.size, block.after = block.size + after.size, after.after
            if after.after is not None:
                after.after.before = block
        if before is not None and before in self._free:
            before.size, before.after = before.size + block.size, block.after
            if block.after is not None:
                block.after.before = before
        else:
            self._free.append(block)

    def _segment(self, rounded: int, small: bool, part: str) -> _Block:
        """Take a segment from the device, after the cache was emptied where that is needed."""
        size = (
            SMALL_SEGMENT if small else MIDDLE_SEGMENT if rounded < MIDDLE else -(-rounded // LARGE_ROUND) * LARGE_ROUND
        )
        if self.reserved + size > self.total:
            self.retries += 1
            for whole in [b for b in self._free if b.before is None and b.after is None]:
                self._free.remove(whole)
                self.reserved -= whole.size
                self.device_frees += 1
        if self.reserved + size > self.total:
            raise OutOfMemoryError(rounded, part)
        self._segments += 1
        self.device_allocs += 1
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        block = _Block(self._segments, 0, size, small)
        self._free.append(block)
        return block


STEPS = 4  # that are simulated: from the second on each is as the one before


@dataclass(frozen=True)
class Saved:
    """What a module saves in the forward pass: its path in a block, its class, values a token, bytes of one, and the
    module whose parameters have their gradients when it is let go of.
    """

    path: str
    kind: str
    values: float
    width: int
    of: str = ""


def saves(model: Model) -> tuple[Saved, ...]:
    """Return what a block saves, in order; attention's result is the next product's input, and saved once."""
    # Autocast computes norms in float32, and so keeps what flows past them (torch.amp: ops that autocast to float32).
    # Softmax too, of whose result the product with the values keeps a copy in 16 bits.
    h, w = model.hidden, WIDTHS[model.activations]
    scores = model.heads * model.sequence
    kept = tuple(Saved("", "Block", scores, width) for width in dict.fromkeys((4, w)))
    return (
        Saved("norm1", "LayerNorm", h, 4, "norm1"),
        Saved("qkv", "Linear", h, w, "qkv"),
        Saved("", "Block", 3 * h, w),  # queries, keys and values
        *(() if model.attention == "fused" else kept),
        Saved("", "Block", h, w, "proj"),
        Saved("norm2", "LayerNorm", h, 4, "norm2"),
        Saved("up", "Linear", h, w, "up"),
        Saved("act", "GELU", 4 * h, w),
        Saved("down", "Linear", 4 * h, w, "down"),
    )


def parameters(model: Model) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return each module's class and the sizes of its parameters, by path; the head shares the embedding's."""
    h = model.hidden
    block = {
        "norm1": ("LayerNorm", (h, h)),
        "qkv": ("Linear", (3 * h * h, 3 * h)),
        "proj": ("Linear", (h * h, h)),
        "norm2": ("LayerNorm", (h, h)),
        "up": ("Linear", (4 * h * h, 4 * h)),
        "down": ("Linear", (4 * h * h, h)),
    }
    made: dict[str, tuple[str, tuple[int, ...]]] = {
        "embedding": ("Embedding", (model.vocabulary * h, model.sequence * h))
    }
    made |= {f"blocks.{n}.{name}": of for n in range(model.blocks) for name, of in block.items()}
    return made | {"norm": ("LayerNorm", (h, h))}


class Step:
    """Runs steps of a job on an allocator."""

    def __init__(self, job: Job) -> None:
        assert job.memory is not None
        self.job, self.model, self.of = job, job.model, job.memory
        self.allocator = Allocator(total_bytes(job) - job.memory.context)
        self.kept_bytes = 0  # that a step leaves allocated
        self.gradient_bytes = self.activation_bytes = 0
        self._states: list[_Block] = []
        self._made = parameters(job.model)
        for _, sizes in self._made.values():
            for size in sizes:
                self.allocator.take(4 * size, "parameter")

    def run(self) -> None:
        """Run one step; raises OutOfMemoryError."""
        a, model, tokens = self.allocator, self.model, self.job.model.tokens
        w = WIDTHS[model.activations]
        batch = a.take(8 * tokens, "input")
        casts = {path: a.take(w * size, "cast") for path, size in self._cast().items()}
        blocks: list[list[_Block]] = []
        stream = a.take(4 * tokens * model.hidden, "temporary")
        for _ in range(model.blocks):
            kept = []
            for one in saves(model):
                checkpointed = self.of.checkpoints and one.path != "norm1"
                made = a.take(round(one.values * one.width * tokens), "temporary" if checkpointed else "activation")
                kept.append(made)
                if checkpointed:
                    a.give(kept.pop())
            blocks.append(kept)
        a.give(stream)
        h, v = model.hidden, model.vocabulary
        last = [a.take(width * tokens * h, "activation") for width in (4, w)]
        logits = a.take(w * tokens * v, "temporary")
        loss = a.take(4 * tokens * v, "activation")
        a.give(logits)
        self.activation_bytes = sum(b.size for kept in [*blocks, last, [loss]] for b in kept)
        # The backward pass: gradients of the scores, then of block after block.
        wide, grad = (a.take(4 * tokens * v, "temporary") for _ in range(2))
        a.give(wide)
        a.give(loss)
        narrow = a.take(w * tokens * v, "temporary")
        a.give(grad)
        flowing = a.take(w * tokens * h, "temporary")
        a.give(narrow)
        shared, *others = self._made["embedding"][1]
        gradients = [a.take(4 * shared, "gradient"), *self._gradients("norm")]
        for block in last:
            a.give(block)
        for n, kept in reversed([*enumerate(blocks)]):
            gradients += self._backward(n, kept, casts)
        a.give(a.take(4 * shared, "temporary"))  # of the embedding, added to that of the head
        gradients += [a.take(4 * size, "gradient") for size in others]
        a.give(flowing)
        self.gradient_bytes = sum(b.size for b in gradients)
        self._optimizer()
        for block in [*gradients, batch]:
            a.give(block)
        self.kept_bytes = a.allocated

    def _cast(self) -> dict[str, int]:
        """Return the sizes of the matrices that autocast copies, by module."""
        if self.model.activations == "float32":
            return {}
        return {path: sizes[0] for path, (kind, sizes) in self._made.items() if kind == "Linear"}

    def _gradients(self, path: str) -> list[_Block]:
        """Make the gradients of a module's parameters."""
        return [self.allocator.take(4 * size, "gradient") for size in self._made[path][1]]

    def _backward(self, n: int, kept: list[_Block], casts: dict[str, _Block]) -> list[_Block]:
        """Run a block's backward pass, function by function: from the gradient of a result that of the input is made,
        and those of the parameters, and then what was saved is let go of.
        """
        a, model, tokens = self.allocator, self.model, self.job.model.tokens
        every, gradients = saves(model), []
        if self.of.checkpoints:
            again = [a.take(round(s.values * s.width * tokens), "activation") for s in every[1:]]
            kept = [*kept, *again]
        flowing = a.take(WIDTHS[model.activations] * tokens * model.hidden, "temporary")
        for one, saved in reversed([*zip(every, kept, strict=True)]):
            # Of softmax there is its result's gradient, in its own width, and its input's.
            softmax = one.path == "" and one.width == 4 and one.values == model.heads * model.sequence
            for _ in range(2 if softmax else 1):
                made = a.take(round(one.values * one.width * tokens), "temporary")
                a.give(flowing)
                flowing = made
            if one.of:
                gradients += self._gradients(f"blocks.{n}.{one.of}")
                if (cast := casts.get(f"blocks.{n}.{one.of}")) is not None:
                    a.give(cast)
            a.give(saved)
        a.give(flowing)
        return gradients

    def _optimizer(self) -> None:
        a = self.allocator
        sizes = [size for _, of in self._made.values() for size in of]
        if not self._states:
            self._states = [a.take(4 * size, "optimizer") for size in sizes for _ in range(self.of.moments)]
        if self.job.optimizer.kind == "foreach":
            for block in [a.take(4 * size, "temporary") for size in sizes]:
                a.give(block)
        if self.job.optimizer.kind == "single" and self.of.moments == 2:
            for size in sizes:  # AdamW's root of the second moment, and what it is divided by
                for block in [a.take(4 * size, "temporary") for _ in range(2)]:
                    a.give(block)


def total_bytes(job: Job) -> int:
    """Return the memory of the job's device."""
    of = job.memory
    return of.total if of is not None and of.total else DEVICES[job.device].memory_bytes


def simulated(job: Job, steps: int = STEPS) -> Step:
    """Return a job after some steps; raises OutOfMemoryError where it does not get so far."""
    made = Step(job)
    for _ in range(steps):
        made.run()
    return made


def held(job: Job, ran: Step) -> dict[str, Any]:
    """Return held.json as dlprof's recorder leaves it: sizes of tensors, without what the allocator rounds up."""
    model = job.model
    rows = list(_rows(job))
    sums: dict[str, int] = {}
    for row in rows:
        sums[row["part"]] = sums.get(row["part"], 0) + row["bytes"]
    device = "cuda:0"
    moments = (
        {"moment": "backward", "gradient_bytes": 0, "activation_bytes": sums["activation"]},
        {"moment": "gradients", "gradient_bytes": sums["gradient"], "activation_bytes": 0},
    )
    return {
        "state": "counted",
        "step": 9,
        "moments": [
            {"device": device, "allocated_bytes": ran.allocator.allocated, "requested_bytes": ran.allocator.allocated}
            | m
            for m in moments
        ],
        "activations": {"state": "counted", "why": "", "graphs": 1, "nodes": 8 * model.blocks, "by_module": True},
        "rows": rows,
    }


def _rows(job: Job) -> Iterator[dict[str, Any]]:
    model, of = job.model, job.memory
    assert of is not None
    w, tokens = WIDTHS[model.activations], model.tokens
    wide = {2: model.activations, 4: "float32"}

    def row(part: str, module: str, kind: str, size: float, dtype: str, tensors: int) -> Mapping[str, Any]:
        return {
            "part": part, "module": module, "kind": kind, "device": "cuda:0", "dtype": dtype, "tensors": tensors,
            "bytes": round(size), "full_bytes": round(size), "trainable": int(part == "parameter"),
        }  # fmt: skip

    for path, (kind, sizes) in parameters(model).items():
        size = 4 * sum(sizes)
        yield dict(row("parameter", path, kind, size, "float32", len(sizes)))
        yield dict(row("gradient", path, kind, size, "float32", len(sizes)))
        if of.moments:
            yield dict(row("optimizer", path, kind, of.moments * size, "float32", of.moments * len(sizes)))
        if kind == "Linear" and w == 2:
            yield dict(row("cast", path, kind, w * sizes[0], model.activations, 1))
    shared = dict(row("shared", "head", "Linear", 0, "float32", 1))
    yield shared | {"full_bytes": 4 * model.vocabulary * model.hidden}
    for n in range(model.blocks):
        for one in saves(model)[: 1 if of.checkpoints else None]:
            path = f"blocks.{n}.{one.path}".rstrip(".")
            yield dict(row("activation", path, one.kind, one.values * one.width * tokens, wide[one.width], 1))
    yield dict(row("activation", "norm", "LayerNorm", 4 * tokens * model.hidden, "float32", 1))
    yield dict(row("activation", "head", "Linear", w * tokens * model.hidden, wide[w], 1))
    yield dict(row("activation", "", "Transformer", 4 * tokens * model.vocabulary, "float32", 1))
    yield dict(row("input", "", "Transformer", 8 * tokens, "int64", 1))
