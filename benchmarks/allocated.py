"""Runs a script and measures, by the CPU's allocator alone, what a step of it holds; nothing of dlprof is used.

    python -m benchmarks.allocated OUT STEP SCRIPT [ARGS]...

torch.profiler notes each allocation and release, and their sum so far. So what a part takes is how much that sum falls
when its storages are made empty: gradients before the optimizer steps, then its state, then the parameters, all found
through Python's garbage collector. What the forward pass leaves is what was allocated since its first module's call and
not released before the backward pass. The script ends there. STEP counts optimizer steps from 0; OUT gets a JSON file a
rank.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

PARTS = ("gradient", "optimizer", "parameter")

# Each reading of the sum is an allocation of a size that nothing else has; its pages are never touched.
_MARK = 77_777_001

_GLOO_S = 0.1


class Watch:
    """Reads the allocator's sum in one step, and ends the script when that is done."""

    def __init__(self, out: Path, step: int) -> None:
        import torch

        self.torch: Any = torch
        self.out, self.step = out, step
        self.steps = 0
        self.marks: list[str] = []
        self.forwards = 0
        self.inside = False  # a forward pass whose backward pass has not begun
        self.profiler: Any = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        )

    def begin(self) -> None:
        """Hook into torch, and note every allocation from now on."""
        torch = self.torch
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        backward = torch.autograd.backward

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self.steps == self.step and self.inside:
                self.mark(f"backward {self.forwards}")
                self.forwards += 1
                self.inside = False
            return backward(*args, **kwargs)

        torch.autograd.backward = watched
        torch.nn.modules.module.register_module_forward_pre_hook(self.before_module)
        register_optimizer_step_pre_hook(self.before_optimizer)
        register_optimizer_step_post_hook(self.after_optimizer)
        self.profiler.start()

    def mark(self, name: str) -> None:
        """Read the allocator's sum, once gloo's thread has let go of what it has exchanged."""
        time.sleep(_GLOO_S)
        self.torch.empty(_MARK + len(self.marks), dtype=self.torch.uint8)
        self.marks.append(name)

    def before_module(self, _module: Any, _args: Any) -> None:
        """Read it before the first module of each forward pass, without the gradients that zero_grad may still free."""
        if self.steps != self.step or self.inside or not self.torch.is_grad_enabled():
            return
        self.inside = True
        if not self.forwards:
            for parameter in self.parameters():
                parameter.grad = None
        self.mark(f"forward {self.forwards}")

    def before_optimizer(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Empty the gradients, the state and the parameters one after the other, and end the script."""
        if self.steps != self.step:
            return
        parameters = list(self.parameters())
        optimizers = [one for one in gc.get_objects() if isinstance(one, self.torch.optim.Optimizer)]
        parts: tuple[Iterable[Any], ...] = (
            [p.grad for p in parameters if p.is_leaf and p.grad is not None],
            [t for one in optimizers for t in self.tensors(list(one.state.values()))],
            parameters,
        )
        self.mark("before")
        for name, tensors in zip(PARTS, parts, strict=True):
            for tensor in tensors:
                whole = getattr(tensor, "_local_tensor", tensor).detach()
                for one in (whole._indices(), whole._values()) if whole.is_sparse else (whole,):
                    one.untyped_storage().resize_(0)
            self.mark(name)
        self.profiler.stop()
        self.write()
        sys.stdout.flush()
        os._exit(0)

    def after_optimizer(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Count the step."""
        self.steps += 1

    def parameters(self) -> Iterator[Any]:
        """List all parameters that there are."""
        return (one for one in gc.get_objects() if isinstance(one, self.torch.nn.Parameter))

    def tensors(self, value: Any) -> Iterator[Any]:
        """List the tensors in an optimizer's state."""
        if isinstance(value, self.torch.Tensor):
            yield value
        elif isinstance(value, (dict, list, tuple)):
            for one in value.values() if isinstance(value, dict) else value:
                yield from self.tensors(one)

    def write(self) -> None:
        """Write what each mark has read, as differences."""
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            self.profiler.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text())["traceEvents"]
        found = differences(sums(events, self.marks)) | {"activation": left(events, self.marks)}
        (self.out / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


def moves(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the allocator did, in order: bytes, negative where they are released, the sum then, and where."""
    return [e["args"] for e in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: float(e["ts"]))]


def sums(events: Iterable[dict[str, Any]], marks: list[str]) -> dict[str, int]:
    """Return the allocator's sum at each mark, without the mark's own bytes."""
    return {
        marks[move["Bytes"] - _MARK]: move["Total Allocated"] - move["Bytes"]
        for move in moves(events)
        if 0 <= move["Bytes"] - _MARK < len(marks)
    }


def left(events: Iterable[dict[str, Any]], marks: list[str]) -> int:
    """Return the most bytes that a forward pass allocates and leaves when its backward pass begins."""
    most = 0
    there: dict[int, int] = {}
    for move in moves(events):
        size, address = move["Bytes"], move["Addr"]
        if 0 <= size - _MARK < len(marks):
            name = marks[size - _MARK]
            if name.startswith("backward "):
                most = max(most, sum(there.values()))
            there = {}
        elif size > 0:
            there[address] = size
        else:
            there.pop(address, None)
    return most


def differences(read: dict[str, int]) -> dict[str, int]:
    """Return what each part takes, from the sums after it was emptied."""
    found = {}
    before = read["before"]
    for part in PARTS:
        found[part], before = before - read[part], read[part]
    return found


if __name__ == "__main__":
    folder, number, script = sys.argv[1:4]
    sys.argv = sys.argv[3:]
    sys.path.insert(0, str(Path(script).parent))
    Watch(Path(folder), int(number)).begin()
    runpy.run_path(script, run_name="__main__")
