"""What a simulated job's training step asks of its allocator, tensor by tensor, and what dlprof would count of that.

As PyTorch trains the transformer of model.py: parameters in float32 (under autocast with copies of the matrices in
16 bits), activations that each function saves for its backward pass, gradients that are made as the backward pass
goes, and dropped when the optimizer has stepped. Checkpointed blocks save their input and compute the rest again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.simulator.allocator import Allocator, _Block
from benchmarks.simulator.hardware import DEVICES
from benchmarks.simulator.job import Job
from benchmarks.simulator.model import Model
from benchmarks.simulator.program import WIDTHS

STEPS = 4  # that are simulated: from the second on each is as the one before


@dataclass(frozen=True)
class Saved:
    """What a module saves in the forward pass: its path in a block, its class, values a token, bytes of one."""

    path: str
    kind: str
    values: float
    width: int


def saves(model: Model) -> tuple[Saved, ...]:
    """Return what a block saves, in order; attention's result is the next product's input, and saved once."""
    # Autocast computes norms in float32, and so keeps what flows past them (torch.amp: ops that autocast to float32).
    h, w = model.hidden, WIDTHS[model.activations]
    scores = 0.0 if model.attention == "fused" else 3.0 * model.heads * model.sequence
    return (
        Saved("norm1", "LayerNorm", h, 4),
        Saved("qkv", "Linear", h, w),
        Saved("", "Block", 4 * h + scores, w),  # queries, keys, values and the result
        Saved("norm2", "LayerNorm", h, 4),
        Saved("up", "Linear", h, w),
        Saved("act", "GELU", 4 * h, w),
        Saved("down", "Linear", 4 * h, w),
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
        casts = [a.take(w * size, "cast") for size in self._cast()]
        saved: list[tuple[str, list[_Block]]] = [("embedding", [])]
        stream = a.take(4 * tokens * model.hidden, "temporary")
        for n in range(model.blocks):
            kept = []
            for one in saves(model):
                checkpointed = self.of.checkpoints and one.path != "norm1"
                made = a.take(round(one.values * one.width * tokens), "temporary" if checkpointed else "activation")
                kept.append(made)
                if checkpointed:
                    a.give(kept.pop())
            saved.append((f"blocks.{n}", kept))
        a.give(stream)
        h, v = model.hidden, model.vocabulary
        saved.append(("norm", [a.take(width * tokens * h, "activation") for width in (4, w)]))
        logits = a.take(w * tokens * v, "temporary")
        loss = a.take(4 * tokens * v, "activation")
        a.give(logits)
        self.activation_bytes = sum(b.size for _, kept in saved for b in kept) + loss.size
        # The backward pass: gradients of the scores, then of block after block.
        wide, grad = (a.take(4 * tokens * v, "temporary") for _ in range(2))
        a.give(wide)
        a.give(loss)
        narrow = a.take(w * tokens * v, "temporary")
        a.give(grad)
        a.give(narrow)
        gradients = self._backward(saved)
        for block in casts:
            a.give(block)
        self.gradient_bytes = sum(b.size for b in gradients)
        self._optimizer()
        for block in [*gradients, batch]:
            a.give(block)
        self.kept_bytes = a.allocated

    def _cast(self) -> list[int]:
        """Return the sizes of the matrices that autocast copies."""
        if self.model.activations == "float32":
            return []
        return [sizes[0] for kind, sizes in self._made.values() if kind == "Linear"]

    def _backward(self, saved: list[tuple[str, list[_Block]]]) -> list[_Block]:
        a, model, tokens = self.allocator, self.model, self.job.model.tokens
        w, gradients = WIDTHS[model.activations], []
        flowing = a.take(w * tokens * model.hidden, "temporary")
        for path, kept in reversed(saved):
            again = []
            if self.of.checkpoints and path.startswith("blocks"):
                again = [a.take(round(s.values * s.width * tokens), "activation") for s in saves(model)[1:]]
            wider = a.take(4 * w * tokens * model.hidden, "temporary") if path.startswith("blocks") else None
            for module, (_, sizes) in self._made.items():
                if module == path or module.startswith(f"{path}."):
                    gradients += [a.take(4 * size, "gradient") for size in sizes]
            for block in [*kept, *again, *([wider] if wider else [])]:
                a.give(block)
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
    for n in range(model.blocks):
        for one in saves(model)[: 1 if of.checkpoints else None]:
            path = f"blocks.{n}.{one.path}".rstrip(".")
            count = 4 if one.path == "" else 1
            yield dict(row("activation", path, one.kind, one.values * one.width * tokens, wide[one.width], count))
    yield dict(row("activation", "norm", "LayerNorm", 4 * tokens * model.hidden, "float32", 1))
    yield dict(row("activation", "head", "Linear", w * tokens * model.hidden, wide[w], 1))
    yield dict(row("activation", "", "Transformer", 4 * tokens * model.vocabulary, "float32", 1))
    yield dict(row("input", "", "Transformer", 8 * tokens, "int64", 1))
