"""Train a convolutional network on several GPUs: a process each, or (the fault) one process for all of them.

    torchrun --nproc-per-node 2 workloads/data_parallel.py              DistributedDataParallel: a process a GPU
    python workloads/data_parallel.py --fault data_parallel             nn.DataParallel: one process, two GPUs or more

nn.DataParallel is one line, and still in many a script: in every step it copies the model to each GPU, shares out the
batch, and gathers the outputs on the first, all in threads of one process. Without a GPU the first form trains on CPU
ranks; the second one needs two GPUs. The pictures are made up in memory: a pattern for each class, and noise. Plain
PyTorch: any profiler can be pointed at it, and none is imported.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

# What can be planted, and the dlprof rule that must notice it. Each is one `if args.fault == ...` below.
FAULTS = {
    "data_parallel": "data_parallel",  # one process drives all GPUs, and copies the model to each in every step
    "pageable": "pageable_copy",  # batches copied to the GPU from ordinary memory
}
NEEDS_GPU = ("pageable",)

CLASSES = 10


class Patterns(Dataset[tuple[Tensor, int]]):
    """Pictures, 3 × size × size: the pattern of a class, and as much noise."""

    def __init__(self, count: int, size: int, seed: int) -> None:
        self.count, self.size, self.seed = count, size, seed
        coarse = torch.randn(CLASSES, 3, 4, 4, generator=torch.Generator().manual_seed(0))
        self.patterns = F.interpolate(coarse, size=(size, size), mode="bilinear")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(self.seed * self.count + index)
        return self.patterns[index % CLASSES] + torch.randn(
            3, self.size, self.size, generator=generator
        ), index % CLASSES


def build_network(width: int) -> nn.Sequential:
    """Return convolutions that halve the picture and double the width three times, and a linear layer."""
    layers: list[nn.Module] = []
    inputs = 3
    for outputs in (width, 2 * width, 4 * width):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
        layers += [
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        ]
        layers.append(nn.MaxPool2d(2))
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


# ---- one rank ------------------------------------------------------------------------------------------------------

# On a CPU core a step then takes some 200 ms, and its one exchange little of that. A GPU's width keeps it busy.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"width": 16, "size": 32, "batch_size": 128, "workers": 1},
    "cuda": {"width": 128, "size": 128, "batch_size": 128, "workers": 6},
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line and fill what it leaves open with the device's DEFAULTS; a usage error exits with 2."""
    faults = "\n".join(f"  {name:22s} must be noticed by {rule}" for name, rule in FAULTS.items())
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog=f"faults:\n{faults}\n\nOptions without a stated default have one for the CPU and one for GPUs.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--width", type=int, help="of the first layer")
    parser.add_argument("--size", type=int, help="of a picture, pixels")
    parser.add_argument("--batch-size", type=int, help="pictures a GPU and step")
    parser.add_argument("--workers", type=int, help="loader workers a GPU")
    parser.add_argument("--steps", type=int, default=100, help="(default: 100)")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate (default: 0.05)")
    parser.add_argument("--log-every", type=int, default=20, metavar="N", help="steps (default: 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fault", choices=list(FAULTS), help="plant this mistake")
    args = parser.parse_args(argv)

    # torchrun says who we are; without it we are the only rank.
    args.rank, args.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    args.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.driven = 1  # how many GPUs this process drives
    if args.fault in NEEDS_GPU and args.device != "cuda":
        parser.error(f"--fault {args.fault} needs a GPU: on a CPU nothing is copied")
    if args.fault == "data_parallel":
        args.driven = torch.cuda.device_count() if args.device == "cuda" else 0
        if args.driven < 2 or args.world > 1:
            parser.error(
                f"--fault data_parallel needs two GPUs (there are {args.driven}) and one process that drives them:"
                f" python {parser.prog} --fault data_parallel, or dlprof run --gpus 1"
            )
    return args


def main() -> None:
    args = parse()
    if args.device == "cuda":
        torch.cuda.set_device(args.local_rank)
    if args.world > 1:
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    torch.manual_seed(args.seed)  # the same on every rank
    model: nn.Module = build_network(args.width).to(args.device)
    if args.fault == "data_parallel":
        model = DataParallel(model)
    elif args.world > 1:
        model = DistributedDataParallel(model, [args.local_rank] if args.device == "cuda" else None)
    if args.rank == 0:
        print(
            f"{sum(p.numel() for p in model.parameters()):,} parameters, {args.world} processes on {args.device} that"
            f" drive {args.driven} each, batch {args.batch_size} a device, fault: {args.fault or 'none'}",
            flush=True,
        )
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, fused=True)

    # As many pictures a step, whoever drives the GPUs.
    batch = args.batch_size * args.driven
    loader = DataLoader(
        Patterns(args.steps * batch, args.size, args.seed + args.rank),
        batch,
        shuffle=True,
        num_workers=args.workers * args.driven,
        pin_memory=args.device == "cuda" and args.fault != "pageable",
        drop_last=True,
    )
    logged_at = time.perf_counter()
    for step, (pictures, labels) in enumerate(loader, start=1):
        x, y = pictures.to(args.device, non_blocking=True), labels.to(args.device, non_blocking=True)
        loss = F.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        if step % args.log_every == 0 and args.rank == 0:
            value = loss.item()  # waits for the device, so not at every step
            now = time.perf_counter()
            rate = args.log_every * batch * args.world / (now - logged_at)
            print(f"step {step}  loss {value:.4f}  {rate:.0f} pictures/s", flush=True)
            logged_at = now

    # Before its group: the other way round, PyTorch 2.13 and gloo's threads may wait for each other for ever.
    del model
    if args.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
