"""The modules of a simulated model: their ranges in the trace, and autograd's numbers of what they compute.

A block is a module, and so is each function of it that has parameters. What is for which module is noted on the device
work itself (Belongs), apart from all that a trace says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from simulator.hardware import US
from simulator.program import Args, Begin, Belongs, End, Function, Instruction

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


def truth(works: Sequence[Any], steps: range) -> dict[tuple[str, str], float]:
    """Return what device work takes of a mean step, by the module and the part of the step that it was launched for."""
    found: dict[tuple[str, str], float] = {}
    for work in works:
        if work.step in steps and work.kind in ("kernel", "set", "copy", "communication"):
            key = ("", "communication") if work.kind == "communication" else work.belongs
            found[key] = found.get(key, 0.0) + (work.end - work.start) / len(steps)
    return found
