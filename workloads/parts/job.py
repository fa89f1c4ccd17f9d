"""The job around the training: its options, its ranks and their process group, and a line every so many steps.

A workload reads its command line with `options` and `read`, joins the other ranks with `ranks` or `process_group`,
announces itself, trains, and hands the loss of each step to a `Log`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler


def options(doc: str | None, faults: Mapping[str, str]) -> argparse.ArgumentParser:
    """Return a parser with --device, --seed and --fault; its help lists the faults, each with the rule it is for."""
    listed = "\n".join(f"  {name:22s} must be noticed by {rule}" for name, rule in faults.items())
    parser = argparse.ArgumentParser(
        description=(doc or "").partition("\n")[0],
        epilog=f"faults:\n{listed}\n\nOptions without a stated default have one for the CPU and one for GPUs.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--fault", choices=list(faults), help="plant this mistake")
    return parser


def read(
    parser: argparse.ArgumentParser,
    argv: list[str] | None,
    defaults: Mapping[str, Mapping[str, Any]],
    needs_gpu: Collection[str] = (),
    needs_two_ranks: Collection[str] = (),
) -> argparse.Namespace:
    """Return the options, with the defaults of the chosen device and the place of this rank among all.

    The place is `rank`, `world` (the number of ranks), `local_rank`, and `device_ids` as DistributedDataParallel wants
    them. A fault that cannot be shown here is a usage error, which exits with 2.
    """
    parser.set_defaults(**defaults[parser.parse_known_args(argv)[0].device])
    args = parser.parse_args(argv)
    # torchrun sets these; without it this is the only rank.
    args.rank, args.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    args.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    args.device_ids = [args.local_rank] if args.device == "cuda" else None
    if args.fault in needs_gpu and args.device == "cpu":
        parser.error(f"--fault {args.fault} needs a GPU")
    if args.fault in needs_two_ranks and args.world < 2:
        parser.error(f"--fault {args.fault} needs two ranks: torchrun --nproc-per-node 2 {parser.prog} ...")
    return args


def announce(args: argparse.Namespace, text: str) -> None:
    """Print what is about to be trained, and the planted fault, on rank 0."""
    if args.rank == 0:
        print(f"{text}, fault: {args.fault or 'none'}", flush=True)


@contextlib.contextmanager
def process_group(args: argparse.Namespace) -> Iterator[None]:
    """Join all ranks in a process group, and leave it at the end; a single process is a group of one.

    Train in a function that is called within: its variables are gone when the group is destroyed. The other way round,
    PyTorch 2.13 may wait for ever: freeing what DistributedDataParallel wraps would free the group while it holds
    Python's lock, and gloo's thread waits for that lock.
    """
    if args.device == "cuda":
        torch.cuda.set_device(args.local_rank)
    if args.world == 1:
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", "0")
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", rank=args.rank, world_size=args.world)
    yield
    dist.destroy_process_group()


def ranks(args: argparse.Namespace) -> contextlib.AbstractContextManager[None]:
    """Return the context of all ranks' process group; a single process goes without one."""
    return process_group(args) if args.world > 1 else contextlib.nullcontext()


def autocast(args: argparse.Namespace) -> torch.autocast:
    """Return the context in which the forward pass runs in --precision; it may be entered again and again."""
    if args.device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = args.precision == "tf32"
        torch.backends.cudnn.allow_tf32 = args.precision == "tf32"  # on by default: fp32 would not be fp32
    dtype = torch.float16 if args.precision == "fp16" else torch.bfloat16
    return torch.autocast(args.device, dtype, enabled=args.precision in ("fp16", "bf16"))


def batches(loader: DataLoader[Any], epochs: int) -> Iterator[Any]:
    """Return every batch of every epoch."""
    for epoch in range(epochs):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)  # else every epoch has the order of the first
        yield from loader


class Log:
    """Prints the loss, and the rate since the line before, every args.log_every steps."""

    def __init__(self, args: argparse.Namespace, unit: str, each_step: int) -> None:
        """Start the clock. A step of all ranks takes `each_step` samples, tokens or whatever the unit is."""
        self.args, self.unit, self.each_step = args, unit, each_step
        self.since = time.perf_counter()

    def step(self, step: int, loss: Tensor) -> None:
        """Print a line on rank 0 if it is time for one."""
        if self.args.rank == 0 and step % self.args.log_every == 0:
            self.line(step, loss)

    def line(self, step: int, loss: Tensor) -> None:
        """Print a line."""
        value = loss.item()  # waits for the device, so not at every step
        now = time.perf_counter()
        rate = self.args.log_every * self.each_step / (now - self.since)
        print(f"step {step}  loss {value:.4f}  {rate:,.0f} {self.unit}/s", flush=True)
        self.since = now
