"""Train a language model whose layers lie on several GPUs of one process, well, or with one of FAULTS planted.

    python workloads/model_parallel.py                         half of the layers on each of two GPUs
    python workloads/model_parallel.py --devices 4
    python workloads/model_parallel.py --fault whole_batch     one GPU works at a time

The batch goes through in micro-batches: a forward pass launches its half on the first GPU and hands over, and while the
second one works, the first begins the next. Nothing is needed for that but the order of launches, for launching does
not wait. Each sequence counts through the vocabulary by a step of its own, so the loss falls once the model has seen
which.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from parts.job import Log, announce, autocast, options, read
from parts.language import Block, Counting
from torch import Tensor, nn
from torch.utils.data import DataLoader

# What can be planted, and the dlprof rule that must notice it. plant() has a line for each.
FAULTS = {
    "whole_batch": "devices_in_turn",  # as a model does that is cut in two and no more
}
NEEDS_GPU = ("whole_batch",)  # a CPU is one device
RANKS = 1  # no distributed job


def plant(args: argparse.Namespace) -> None:
    """Change the settings of a healthy run into those of a run with args.fault. No other code asks for the fault."""
    faulty: dict[str, dict[str, Any]] = {"whole_batch": {"microbatches": 1}}
    vars(args).update(faulty.get(args.fault, {}))


class Parts(nn.Module):
    """A model whose blocks lie on several devices; features go from each to the next."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.devices = [torch.device(args.device, n) for n in range(args.devices)]
        self.token = nn.Embedding(args.vocabulary, args.width, device=self.devices[0])
        self.place = nn.Embedding(args.length, args.width, device=self.devices[0])
        places = [n * args.devices // args.layers for n in range(args.layers)]
        self.blocks = nn.ModuleList(Block(args.width, args.heads).to(self.devices[n]) for n in places)
        self.places = places
        self.norm = nn.LayerNorm(args.width, device=self.devices[-1])
        self.head = nn.Linear(args.width, args.vocabulary, device=self.devices[-1])

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits on the last device, batch × length × vocabulary, of tokens on the first (batch × length)."""
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block, place in zip(self.blocks, self.places, strict=True):
            x = block(x.to(self.devices[place], non_blocking=True))
        logits: Tensor = self.head(self.norm(x.to(self.devices[-1], non_blocking=True)))
        return logits


DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"width": 32, "heads": 4, "length": 16, "batch_size": 16, "layers": 4, "precision": "fp32", "devices": 1},
    "cuda": {
        "width": 2048,
        "heads": 16,
        "length": 1024,
        "batch_size": 64,
        "layers": 16,
        "precision": "bf16",
        "devices": 2,
    },
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options, with those of the fault planted; a usage error exits with 2."""
    parser = options(__doc__, FAULTS)
    add = parser.add_argument
    add("--devices", type=int, help="GPUs that the layers lie on (default: 2; a CPU is one)")
    add("--microbatches", type=int, help="that a batch is cut into (default: four a device)")
    add("--layers", type=int)
    add("--width", type=int)
    add("--heads", type=int)
    add("--vocabulary", type=int, default=128, help="tokens (default: 128)")
    add("--length", type=int, help="of a sequence, tokens")
    add("--batch-size", type=int, help="sequences a step")
    add("--precision", choices=["fp32", "tf32", "bf16"])
    add("--steps", type=int, default=60, help="(default: 60)")
    add("--lr", type=float, default=0.001, help="learning rate (default: 0.001)")
    add("--log-every", type=int, default=20, metavar="N", help="steps (default: 20)")
    args = read(parser, argv, DEFAULTS, NEEDS_GPU)
    there = torch.cuda.device_count() if args.device == "cuda" else 1
    if args.devices > there:
        parser.error(f"--devices {args.devices}: there is no more than {there} here")
    args.microbatches = args.microbatches or 4 * args.devices
    plant(args)
    if args.batch_size % args.microbatches:
        parser.error(f"--batch-size {args.batch_size} cannot be cut into {args.microbatches} micro-batches")
    return args


def main() -> None:
    args = parse()
    torch.manual_seed(args.seed)
    model = Parts(args)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, fused=True)
    in_precision = autocast(args)
    announce(
        args,
        f"{args.layers} layers of {args.width} over {args.devices} devices, batch {args.batch_size} in"
        f" {args.microbatches} micro-batches",
    )
    loader = DataLoader(Counting(args.vocabulary, args.length, args.seed), args.batch_size)
    log = Log(args, "sequences", args.batch_size)
    for step, sequences in enumerate(loader, start=1):
        losses = []
        for piece in sequences.to(model.devices[0], non_blocking=True).chunk(args.microbatches):
            with in_precision:
                logits = model(piece[:, :-1])
            wanted = piece[:, 1:].to(model.devices[-1], non_blocking=True)
            losses.append(F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten()))
        loss = torch.stack(losses).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        log.step(step, loss)
        if step == args.steps:
            break


if __name__ == "__main__":
    main()
