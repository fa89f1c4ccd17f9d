"""Keep one part of the GPU busy, step after step: its tensor cores, its memory, or its link to the host.

    --what product   bf16 products of --size × --size matrices, eight a step
    --what copy      copies from device memory to device memory, --gib each, ten a step
    --what upload    copies from pinned host memory to the device, --gib each, ten a step

A small layer is trained beside it, so that it is a training job. What CUDA events say, and the FLOPs and bytes of a
step as the script itself counts them, go to --out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from marks import Marks  # type: ignore[import-not-found] # it lies beside this script
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

COPIES = 10
# A step of the product: so many forwards, and of each the backward pass that makes the weight's gradient.
FORWARDS = 4
# Steps that may be queued: enough that the device never waits, so few that the loop ends when it should.
AHEAD = 3


def work_of(args: argparse.Namespace) -> tuple[Callable[[], None], float, float]:
    """Return what gives the device its work of a step, the FLOPs of it and the bytes that it moves."""
    on_gpu = args.device == "cuda"
    if args.what == "product":
        kind = torch.bfloat16 if on_gpu else torch.float32
        layer = nn.Linear(args.size, args.size, bias=False, device=args.device, dtype=kind)
        x = torch.randn(args.size, args.size, device=args.device, dtype=kind)
        slope = torch.randn(args.size, args.size, device=args.device, dtype=kind)

        def multiply() -> None:
            for _ in range(FORWARDS):
                layer.zero_grad(set_to_none=True)  # nothing is added up: a step is products and nothing else
                layer(x).backward(slope)

        # A product of n × n matrices is n³ multiplications and as many additions.
        return multiply, 2.0 * FORWARDS * 2.0 * args.size**3, 0.0
    size = int(args.gib * 2**30)
    there = torch.empty(size, dtype=torch.uint8, device=args.device).random_()
    if args.what == "copy":
        other = torch.empty_like(there)

        def copy() -> None:
            for _ in range(COPIES):
                other.copy_(there)

        return copy, 0.0, 2.0 * COPIES * size  # each byte is read and written
    here = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)

    def upload() -> None:
        for _ in range(COPIES):
            there.copy_(here, non_blocking=True)

    return upload, 0.0, float(COPIES * size)


def main() -> None:
    """Work for so many seconds, and write what the events say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--what", choices=["product", "copy", "upload"], default="product")
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    torch.manual_seed(0)
    marks = Marks(args.device)
    work, flops, moved = work_of(args)
    model = nn.Linear(64, 64).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    most = 1_000_000
    loader = DataLoader(TensorDataset(torch.zeros(1).expand(most, 64)), 1, pin_memory=marks.on_gpu)
    began: list[Any] = []
    busy: list[tuple[Any, Any]] = []
    at_ns: list[int] = []
    marks.finish()
    ends = time.monotonic() + args.seconds
    for step, (x,) in enumerate(loader):
        if time.monotonic() > ends:
            break
        x = x.to(args.device, non_blocking=True)
        at_ns.append(time.time_ns())
        began.append(marks.mark())
        work()
        busy.append((began[-1], marks.mark()))
        loss: Tensor = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step >= AHEAD:
            marks.wait(busy[step - AHEAD][1])
    marks.finish()
    told = {
        "steps": len(began),
        "began_ms": [marks.between_ms(began[0], mark) for mark in began],
        "busy_ms": [marks.between_ms(first, second) for first, second in busy],
        "flops": flops,
        "bytes": moved,
        "at_ns": [at_ns[0], time.time_ns()],
    }
    args.out.write_text(json.dumps(told))
    print(f"{len(began)} steps", flush=True)


if __name__ == "__main__":
    main()
