"""Train a network whose every step gives the device a known time of work, with a host that runs ahead of it.

The device's work is `torch.cuda._sleep`, cut into kernels, calibrated when the job starts. The host runs --host-ms of
Python a step and is --ahead steps ahead at most, as where a loss is read some steps late; with --item it reads the loss
in every step, and runs --python-ms of Python before it goes on. What CUDA events say of each step goes to --out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from marks import Marks, spin  # type: ignore[import-not-found] # it lies beside this script
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

# Kernels between two events: so few events that they cost nothing, so many that each pair holds no gap.
KERNELS_A_CHUNK = 8
WIDTH = 256


class Job(nn.Module):
    """A linear layer, behind the work that makes a step as long as it is to be."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self.work = work
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return features, batch × WIDTH, of features of the same shape."""
        self.work()
        y: Tensor = self.linear(x)
        return y


def cycles_of(ms: float) -> int:
    """Return how many of its cycles the GPU makes in so many ms, once it has its full clock."""
    probe, cuda = 100_000_000, cast("Any", torch.cuda)
    cuda._sleep(10 * probe)
    begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    cuda._sleep(probe)
    end.record()
    end.synchronize()
    return int(ms * probe / begin.elapsed_time(end))


def work_of(args: argparse.Namespace, marks: Marks, chunks: list[tuple[Any, Any]]) -> Callable[[], None]:
    """Return what gives the device its work of a step, and puts the marks around each part of it into `chunks`."""
    if not marks.on_gpu:
        square = torch.randn(WIDTH, WIDTH)

        def multiply() -> None:
            begin = marks.mark()
            while time.perf_counter() < begin + args.device_ms / 1e3:
                torch.mm(square, square)
            chunks.append((begin, marks.mark()))

        return multiply
    cycles, sleep = cycles_of(args.device_ms / args.kernels), cast("Any", torch.cuda)._sleep

    def wait() -> None:
        for first in range(0, args.kernels, KERNELS_A_CHUNK):
            begin = marks.mark()
            for _ in range(first, min(first + KERNELS_A_CHUNK, args.kernels)):
                sleep(cycles)
            chunks.append((begin, marks.mark()))

    return wait


def main() -> None:
    """Train, and write what the events say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--ahead", type=int, default=3, help="steps that the host may be ahead of the device")
    parser.add_argument("--device-ms", type=float, default=40.0, help="of work on the device in a step")
    parser.add_argument("--kernels", type=int, default=64, help="that this work is cut into")
    parser.add_argument("--host-ms", type=float, default=5.0, help="of Python in a step, before it launches anything")
    parser.add_argument("--item", action="store_true", help="read the loss in every step")
    parser.add_argument("--python-ms", type=float, default=0.0, help="of Python after the loss was read")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    torch.manual_seed(0)
    marks = Marks(args.device)
    chunks: list[tuple[Any, Any]] = []
    model = Job(work_of(args, marks, chunks)).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = DataLoader(TensorDataset(torch.randn(8 * args.steps, WIDTH)), 8, pin_memory=marks.on_gpu)
    began: list[Any] = []
    ended: list[Any] = []
    of_step: list[int] = []
    losses: list[Tensor] = []
    for step, (x,) in enumerate(loader):
        spin(args.host_ms / 1e3)
        x = x.to(args.device, non_blocking=True)
        began.append(marks.mark())
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        ended.append(marks.mark())
        of_step.append(len(chunks))
        losses.append(loss.detach())
        if args.item:
            loss.item()
            spin(args.python_ms / 1e3)
        elif step >= args.ahead:
            marks.wait(ended[step - args.ahead])
    marks.finish()

    first = [0, *of_step]
    spent = [marks.between_ms(begin, end) for begin, end in chunks]
    told: dict[str, Any] = {
        "steps": len(began),
        "began_ms": [marks.between_ms(began[0], mark) for mark in began],
        "busy_ms": [sum(spent[a:b]) for a, b in zip(first, of_step, strict=False)],
        "losses": [float(loss) for loss in losses],
    }
    args.out.write_text(json.dumps(told))
    print(f"{len(began)} steps, loss {told['losses'][-1]:.6f}", flush=True)


if __name__ == "__main__":
    main()
