"""Train a ResNet with Horovod, as many scripts of some years ago still do, well, or with one of FAULTS planted.

    horovodrun -np 2 python workloads/horovod_resnet.py
    mpirun -np 2 python workloads/horovod_resnet.py                     where Horovod was built with MPI
    dlprof wrap -- horovodrun -np 2 python workloads/horovod_resnet.py --fault no_workers

Needs Horovod, built for the torch that is there: HOROVOD_WITH_PYTORCH=1 pip install --no-build-isolation horovod, with
HOROVOD_GPU_OPERATIONS=NCCL for GPUs and HOROVOD_WITH_GLOO=1 without. Its last release, 0.28.1, builds against torch 2.1
and later only where its CMakeLists.txt ask for a newer C++: CMAKE_CXX_STANDARD 17 in its own and 20 in horovod/torch's,
and -std=c++17 in third_party/gloo's. It has launchers of its own: torchrun's ranks it does not join. The pictures are
made up in memory: a pattern for each class, and noise; each takes --read-ms to read, as from storage. Any profiler can
be pointed at it, and none is imported.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

# What can be planted, and the dlprof rule that must notice it. Each is one `if args.fault == ...` below.
FAULTS = {
    "no_workers": "input_wait",  # the training thread reads
    "python_metrics": "host_bound",  # statistics in pure Python after each step
}

# It joins no ranks but those of its own launcher; the number of them follows.
LAUNCHER = ("horovodrun", "-np")

CLASSES = 10


class Patterns(Dataset[tuple[Tensor, int]]):
    """Pictures, 3 × size × size: the pattern of a class, and as much noise."""

    def __init__(self, count: int, size: int, read_ms: float, seed: int) -> None:
        self.count, self.size, self.read_ms, self.seed = count, size, read_ms, seed
        coarse = torch.randn(CLASSES, 3, 4, 4, generator=torch.Generator().manual_seed(0))
        self.patterns = F.interpolate(coarse, size=(size, size), mode="bilinear")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self.read_ms / 1000)
        generator = torch.Generator().manual_seed(self.seed * self.count + index)
        noise = torch.randn(3, self.size, self.size, generator=generator)
        return self.patterns[index % CLASSES] + noise, index % CLASSES


# ---- the model: He et al., Deep Residual Learning for Image Recognition, 2015 --------------------------------------


class Block(nn.Module):
    """Two 3×3 convolutions and a way around them."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        same = inputs == width and stride == 1
        self.around = nn.Identity() if same else nn.Conv2d(inputs, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's features, as many channels as `width`."""
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(y)) + self.around(x), inplace=True)


def build_resnet(width: int, blocks: int) -> nn.Sequential:
    """Return three groups of so many blocks; the picture is halved and the width doubled from one to the next."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    inputs = width
    for group in range(3):
        for n in range(blocks):
            outputs = width * 2**group
            layers.append(Block(inputs, outputs, 2 if group and not n else 1))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


# ---- one rank ------------------------------------------------------------------------------------------------------

DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"width": 16, "blocks": 3, "size": 32, "batch_size": 16, "workers": 2},
    "cuda": {"width": 128, "blocks": 6, "size": 128, "batch_size": 128, "workers": 8},
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
    parser.add_argument("--blocks", type=int, help="of each of three groups")
    parser.add_argument("--size", type=int, help="of a picture, pixels")
    parser.add_argument("--batch-size", type=int, help="pictures a rank and step")
    parser.add_argument("--workers", type=int, help="loader workers a rank")
    parser.add_argument("--read-ms", type=float, default=1.5, help="a read waits so long for storage (default: 1.5)")
    parser.add_argument("--steps", type=int, default=100, help="(default: 100)")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate of a rank (default: 0.05)")
    parser.add_argument("--log-every", type=int, default=20, metavar="N", help="steps (default: 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fault", choices=list(FAULTS), help="plant this mistake")
    args = parser.parse_args(argv)
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.fault == "no_workers":
        args.workers = 0
    return args


def main() -> None:
    args = parse()
    try:
        import horovod.torch as hvd
    except ImportError:
        sys.exit(
            "horovod_resnet.py needs Horovod, built for this torch: HOROVOD_WITH_PYTORCH=1 pip install"
            " --no-build-isolation horovod (for torch 2.1 and later see the top of this file); horovodrun starts it"
        )

    hvd.init()
    if args.device == "cuda":
        torch.cuda.set_device(hvd.local_rank())
    torch.manual_seed(args.seed)
    model = build_resnet(args.width, args.blocks).to(args.device)
    plain = torch.optim.SGD(model.parameters(), args.lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks on {args.device}, batch {args.batch_size} a rank, fault: {args.fault or 'none'}")

    loader = DataLoader(
        Patterns(args.steps * args.batch_size, args.size, args.read_ms, args.seed + hvd.rank()),
        args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
        pin_memory=args.device == "cuda",
        drop_last=True,
    )
    seen: dict[int, int] = {}
    logged_at = time.perf_counter()
    for step, (pictures, labels) in enumerate(loader, start=1):
        x, y = pictures.to(args.device, non_blocking=True), labels.to(args.device, non_blocking=True)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if args.fault == "python_metrics":
            for pixel in pictures.flatten().tolist():
                seen[round(10 * pixel)] = seen.get(round(10 * pixel), 0) + 1

        if step % args.log_every == 0 and hvd.rank() == 0:
            value = loss.item()  # waits for the device, so not at every step
            now = time.perf_counter()
            rate = args.log_every * args.batch_size * hvd.size() / (now - logged_at)
            print(f"step {step}  loss {value:.4f}  {rate:.0f} pictures/s", flush=True)
            logged_at = now


if __name__ == "__main__":
    main()
