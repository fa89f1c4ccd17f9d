"""Two ranks that exchange a known number of collectives a step, one of which always comes late; they may share a GPU.

Run under torchrun. Each rank works for --device-ms, the last one then sleeps for --late-ms on the host, and all of them
exchange --collectives all-reduces. When a rank had done its work and was about to ask for the first of them is written,
on the host's one monotonic clock, to OUT/arrived-RANK.json.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 512


def main() -> None:
    """Train, and write when this rank came."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device-ms", type=float, default=3.0)
    parser.add_argument("--late-ms", type=float, default=20.0)
    parser.add_argument("--collectives", type=int, default=4, help="all-reduces a step, of 256 KiB each")
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    args = parser.parse_args()

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = args.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(args.backend, timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    parts = [torch.ones(65536, device=args.device) for _ in range(args.collectives)]
    loader = DataLoader(TensorDataset(torch.randn(8 * args.steps, WIDTH)), 8, pin_memory=on_gpu)
    cuda: Any = torch.cuda
    cycles = int(args.device_ms * 1.5e6)  # of some 1.5 GHz: how long it takes exactly does not matter here
    square = torch.randn(WIDTH, WIDTH)
    arrived: list[int] = []
    for (x,) in loader:
        x = x.to(args.device, non_blocking=True)
        loss = model(x).square().mean()
        loss.backward()
        if on_gpu:
            cuda._sleep(cycles)
            cuda.current_stream().synchronize()
        else:
            ends = time.perf_counter() + args.device_ms / 1e3
            while time.perf_counter() < ends:
                torch.mm(square, square)
        if rank == world - 1:
            time.sleep(args.late_ms / 1e3)
        arrived.append(time.monotonic_ns())
        for part in parts:
            dist.all_reduce(part)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    (args.out / f"arrived-{rank}.json").write_text(json.dumps(arrived))
    if on_gpu:
        torch.cuda.synchronize()
    dist.barrier()
    time.sleep(1)  # gloo aborts who is still in the barrier when the other one closes its connections
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
