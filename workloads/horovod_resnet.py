"""Train a ResNet with Horovod, as many scripts of some years ago still do, well, or with one of FAULTS planted.

    horovodrun -np 2 python workloads/horovod_resnet.py
    mpirun -np 2 python workloads/horovod_resnet.py                     where Horovod was built with MPI
    dlprof wrap -- horovodrun -np 2 python workloads/horovod_resnet.py --fault no_workers

Needs Horovod, built for the torch that is there: HOROVOD_WITH_PYTORCH=1 pip install --no-build-isolation horovod, with
HOROVOD_GPU_OPERATIONS=NCCL for GPUs and HOROVOD_WITH_GLOO=1 without. Its last release, 0.28.1, builds against torch 2.1
and later only where its CMakeLists.txt ask for a newer C++: CMAKE_CXX_STANDARD 17 in its own and 20 in horovod/torch's,
and -std=c++17 in third_party/gloo's. It has launchers of its own: torchrun's ranks it does not join. The pictures are
made up in memory: a pattern for each class, and noise; each takes --read-ms to read, as from storage.
"""

from __future__ import annotations

import argparse
import functools
import sys
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from parts.job import Log, announce, options, read
from parts.metrics import count_brightness
from parts.networks import resnet
from parts.pictures import Patterns
from torch.utils.data import DataLoader, DistributedSampler

# What can be planted, and the dlprof rule that must notice it. plant() has a line for each.
NEEDS = {
    "horovod": "HOROVOD_WITH_PYTORCH=1 pip install --no-build-isolation horovod (for torch 2.1 and later see the top of"
    " the script)"
}
FAULTS = {
    "no_workers": "input_wait",  # the training thread reads
    "python_metrics": "host_bound",  # statistics in pure Python after each step
}

# It joins no ranks but those of its own launcher; the number of them follows.
LAUNCHER = ("horovodrun", "-np")


def plant(args: argparse.Namespace) -> None:
    """Change the settings of a healthy run into those of a run with args.fault. No other code asks for the fault."""
    healthy: dict[str, Any] = {"after_step": lambda _pictures: None}
    faulty: dict[str, dict[str, Any]] = {
        "no_workers": {"workers": 0},
        "python_metrics": {"after_step": functools.partial(count_brightness, seen={})},
    }
    vars(args).update(healthy | faulty.get(args.fault, {}))


DEFAULTS = {
    "cpu": {"width": 16, "blocks": 3, "size": 32, "batch_size": 16, "workers": 2},
    "cuda": {"width": 128, "blocks": 6, "size": 128, "batch_size": 128, "workers": 8},
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options, with those of the fault planted; a usage error exits with 2."""
    parser = options(__doc__, FAULTS)
    add = parser.add_argument
    add("--width", type=int, help="of the first layer")
    add("--blocks", type=int, help="of each of three groups")
    add("--size", type=int, help="of a picture, pixels")
    add("--batch-size", type=int, help="pictures a rank and step")
    add("--workers", type=int, help="loader workers a rank")
    add("--read-ms", type=float, default=1.5, help="a read waits so long for storage (default: 1.5)")
    add("--steps", type=int, default=100, help="(default: 100)")
    add("--lr", type=float, default=0.05, help="learning rate of a rank (default: 0.05)")
    add("--log-every", type=int, default=20, metavar="N", help="steps (default: 20)")
    args = read(parser, argv, DEFAULTS)
    plant(args)
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
    args.rank, args.world = hvd.rank(), hvd.size()
    if args.device == "cuda":
        torch.cuda.set_device(hvd.local_rank())
    torch.manual_seed(args.seed)
    model = resnet(False, args.width, 3 * [args.blocks], Patterns.classes, small=True).to(args.device)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # absent in torch's hints
    plain = torch.optim.SGD(model.parameters(), args.lr * args.world, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    announce(args, f"{args.world} ranks on {args.device}, batch {args.batch_size} a rank")

    pictures = Patterns(args.steps * args.batch_size * args.world, args.size, args.seed, args.read_ms)
    loader = DataLoader(
        pictures,
        args.batch_size,
        sampler=DistributedSampler(pictures, args.world, args.rank, seed=args.seed),  # each rank reads its own share
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
        pin_memory=args.device == "cuda",
        drop_last=True,
    )
    log = Log(args, "pictures", args.batch_size * args.world)
    for step, (batch, labels) in enumerate(loader, start=1):
        x, y = batch.to(args.device, non_blocking=True), labels.to(args.device, non_blocking=True)
        x = x.to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        args.after_step(batch)
        log.step(step, loss)


if __name__ == "__main__":
    main()
