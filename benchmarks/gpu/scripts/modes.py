"""Train a small network eagerly, compiled, or as one captured CUDA graph a step with the optimizer inside it.

    --mode eager      as it stands
    --mode compiled   torch.compile(mode="reduce-overhead"), which captures graphs where there is a GPU
    --mode graph      steps of a DataLoader: three eager ones, then one graph is captured, and replayed for each batch
    --mode replay     the same without a loader: after the capture a step is nothing but the graph's replay

Prints its losses, all digits of them, and how many steps it made.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, BATCH = 1024, 256
# PyTorch's documentation asks for some eager steps on another stream before a capture, and has three.
EAGER = 3


def steps_of(
    args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[int, Tensor], Tensor]:
    """Return what makes one step with a batch on the device and returns its loss, a tensor of its own."""

    def plain(batch: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss: Tensor = model(batch).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    if args.mode in ("eager", "compiled") or args.device == "cpu":
        return lambda _step, batch: plain(batch).clone()

    batch_there = torch.zeros(BATCH, WIDTH, device=args.device)
    cuda: Any = torch.cuda
    beside, graph = cuda.Stream(), cuda.CUDAGraph()
    loss_there = torch.zeros((), device=args.device)

    def captured(step: int, batch: Tensor) -> Tensor:
        nonlocal loss_there
        batch_there.copy_(batch, non_blocking=True)
        if step < EAGER:
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                loss = plain(batch_there)
            torch.cuda.current_stream().wait_stream(beside)
            return loss.clone()
        if step == EAGER:
            optimizer.zero_grad(set_to_none=True)  # the eager steps' gradients are not of the graph's memory
            with torch.cuda.graph(graph):
                loss_there = plain(batch_there)
        graph.replay()
        return loss_there.clone()

    return captured


def main() -> None:
    """Train, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mode", choices=["eager", "compiled", "graph", "replay"], default="eager")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()

    torch.manual_seed(0)
    on_gpu = args.device == "cuda"
    layers = [layer for _ in range(args.layers) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model: nn.Module = nn.Sequential(*layers).to(args.device)
    # capturable: its step counts on the device, as a graph needs it.
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, capturable=on_gpu)
    if args.mode == "compiled":
        model.compile(mode="reduce-overhead" if on_gpu else None, backend="inductor" if on_gpu else "eager")
    step = steps_of(args, model, optimizer)
    losses: list[Tensor] = []

    def batches() -> Iterator[Tensor]:
        if args.mode == "replay":
            one = torch.randn(BATCH, WIDTH, device=args.device)
            for _ in range(args.steps):
                yield one
            return
        data = TensorDataset(torch.randn(BATCH * args.steps, WIDTH))
        for (batch,) in DataLoader(data, BATCH, pin_memory=on_gpu):
            yield batch.to(args.device, non_blocking=True)

    for number, batch in enumerate(batches()):
        losses.append(step(number, batch))
    print(json.dumps({"mode": args.mode, "steps": len(losses), "losses": [float(loss) for loss in losses]}), flush=True)


if __name__ == "__main__":
    main()
