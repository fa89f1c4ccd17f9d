"""Train a convolutional network on several GPUs: a process each, or (the fault) one process for all of them.

    torchrun --nproc-per-node 2 workloads/data_parallel.py              DistributedDataParallel: a process a GPU
    python workloads/data_parallel.py --fault data_parallel             nn.DataParallel: one process, two GPUs or more

nn.DataParallel is one line, and still in many a script: in every step it copies the model to each GPU, shares out the
batch, and gathers the outputs on the first, all in threads of one process. Without a GPU the first form trains on CPU
ranks; the second one needs two GPUs. The pictures are made up in memory: a pattern for each class, and noise.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from parts.job import Log, announce, options, ranks, read
from parts.networks import small_network
from parts.pictures import Patterns
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DataLoader

# What can be planted, and the dlprof rule that must notice it. plant() has a line for each.
FAULTS = {
    "data_parallel": "data_parallel",  # one process drives all GPUs, and copies the model to each in every step
    "double": "float64_compute",  # the network and its pictures are in float64
    "pageable": "pageable_copy",  # batches copied to the GPU from ordinary memory
}
NEEDS_GPU = ("pageable",)  # on a CPU nothing is copied


def plant(args: argparse.Namespace) -> None:
    """Change the settings of a healthy run into those of a run with args.fault. No other code asks for the fault."""
    healthy = {"data_parallel": False, "driven": 1, "pin_memory": args.device == "cuda", "dtype": torch.float32}
    all_gpus = torch.cuda.device_count() if args.device == "cuda" else 0
    faulty: dict[str, dict[str, Any]] = {
        "data_parallel": {"data_parallel": True, "driven": all_gpus},
        "double": {"dtype": torch.float64},
        "pageable": {"pin_memory": False},
    }
    vars(args).update(healthy | faulty.get(args.fault, {}))


# On a CPU core a step then takes some 200 ms, and its one exchange little of that. A GPU's width keeps it busy.
DEFAULTS = {
    "cpu": {"width": 16, "size": 32, "batch_size": 128, "workers": 1},
    "cuda": {"width": 128, "size": 128, "batch_size": 128, "workers": 6},
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options, with those of the fault planted; a usage error exits with 2."""
    parser = options(__doc__, FAULTS)
    add = parser.add_argument
    add("--width", type=int, help="of the first layer")
    add("--size", type=int, help="of a picture, pixels")
    add("--batch-size", type=int, help="pictures a GPU and step")
    add("--workers", type=int, help="loader workers a GPU")
    add("--steps", type=int, default=100, help="(default: 100)")
    add("--lr", type=float, default=0.05, help="learning rate (default: 0.05)")
    add("--log-every", type=int, default=20, metavar="N", help="steps (default: 20)")
    args = read(parser, argv, DEFAULTS, NEEDS_GPU)
    plant(args)
    if args.data_parallel and (args.driven < 2 or args.world > 1):
        parser.error(
            f"--fault data_parallel needs two GPUs (there are {args.driven}) and one process that drives them:"
            f" python {parser.prog} --fault data_parallel, or dlprof run --gpus 1"
        )
    return args


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)  # the same on every rank
    model: nn.Module = small_network(args.width, Patterns.classes).to(args.device, args.dtype)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # absent in torch's hints
    if args.data_parallel:
        model = DataParallel(model)
    elif args.world > 1:
        model = DistributedDataParallel(model, args.device_ids)
    announce(
        args,
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {args.world} processes on {args.device} that"
        f" drive {args.driven} each, batch {args.batch_size} a device",
    )
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, fused=True)

    # As many pictures a step, whoever drives the GPUs.
    batch = args.batch_size * args.driven
    loader = DataLoader(
        Patterns(args.steps * batch, args.size, args.seed + args.rank),
        batch,
        shuffle=True,
        num_workers=args.workers * args.driven,
        pin_memory=args.pin_memory,
        drop_last=True,
    )
    log = Log(args, "pictures", batch * args.world)
    for step, (pictures, labels) in enumerate(loader, start=1):
        x, y = pictures.to(args.device, non_blocking=True), labels.to(args.device, non_blocking=True)
        x = x.to(args.dtype, memory_format=torch.channels_last)
        loss = F.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        log.step(step, loss)


def main() -> None:
    args = parse()
    with ranks(args):
        train(args)


if __name__ == "__main__":
    main()
