"""Train a small language model whose layers are spread over a pipeline, well, or with one of the mistakes in FAULTS.

    torchrun --nproc-per-node 2 workloads/pipeline_transformer.py                          a stage a GPU, or a CPU rank
    torchrun --nproc-per-node 2 workloads/pipeline_transformer.py --schedule Interleaved1F1B
    torchrun --nproc-per-node 2 workloads/pipeline_transformer.py --schedule Naive          one stage works at a time
    torchrun --nproc-per-node 2 workloads/pipeline_transformer.py --split 6,2              layers of each stage
    torchrun --nproc-per-node 2 workloads/pipeline_transformer.py --fault few_microbatches

Each sequence counts through the vocabulary by a step of its own, so the loss falls once the model has seen which. Plain
PyTorch: any profiler can be pointed at it, and none is imported.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.utils.data import DataLoader, IterableDataset

# What can be planted, and the dlprof rule that must notice it. Each is one `if args.fault == ...` below.
FAULTS = {
    "few_microbatches": "pipeline_bubble",  # as many as there are ranks: the least that 1F1B takes
    "uneven_split": "stage_imbalance",  # the last stage has half of the others' layers besides its own
}

# Naive: the whole batch goes through one stage after the other, as a model does that is cut up and no more.
ONE_STAGE_A_RANK = ("Naive", "GPipe", "1F1B")
SCHEDULES = (
    *ONE_STAGE_A_RANK,
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # the first and the last stage are on the same rank


# ---- the model: Radford et al., Language Models are Unsupervised Multitask Learners, 2019 --------------------------


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each after a norm and beside a way around."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return features, batch × length × width, of features of the same shape."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        down: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + down


class Stage(nn.Module):
    """Some of the model's blocks; the first stage also embeds the tokens, and the last one gives their logits."""

    def __init__(self, args: argparse.Namespace, blocks: int, first: bool, last: bool) -> None:
        super().__init__()
        self.token = nn.Embedding(args.vocabulary, args.width) if first else None
        self.place = nn.Embedding(args.length, args.width) if first else None
        self.blocks = nn.ModuleList(Block(args.width, args.heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(args.width) if last else None
        self.head = nn.Linear(args.width, args.vocabulary) if last else None

    def forward(self, x: Tensor) -> Tensor:
        """Return features, or logits, of tokens (batch × length) or features (batch × length × width)."""
        if self.token is not None and self.place is not None:
            x = self.token(x) + self.place(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def stages_of(rank: int, ranks: int, schedule: str) -> list[int]:
    """Return the stages that a rank holds, as its schedule wants them."""
    if schedule in ONE_STAGE_A_RANK:
        return [rank]
    return [rank, 2 * ranks - 1 - rank] if schedule in V_SHAPED else [rank, rank + ranks]


def share_out(layers: int, stages: int) -> list[int]:
    """Return how many layers each stage has; where they cannot be shared out evenly, the first stages have one more."""
    return [len(range(stage, layers, stages)) for stage in range(stages)]


# ---- the text ------------------------------------------------------------------------------------------------------


class Counting(IterableDataset[Tensor]):
    """Endless sequences of tokens, length + 1 each, that count from anywhere by 1 to 8, round and round."""

    def __init__(self, vocabulary: int, length: int, seed: int) -> None:
        self.vocabulary, self.length, self.seed = vocabulary, length, seed

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            start, step = torch.randint(self.vocabulary, (2,), generator=generator).tolist()
            yield (start + (1 + step % 8) * torch.arange(self.length + 1)) % self.vocabulary


# ---- one rank ------------------------------------------------------------------------------------------------------

# On two CPU cores a step then takes some 300 ms; a GPU's width keeps it busy.
DEFAULTS = {
    "cpu": {"width": 128, "heads": 4, "length": 64, "batch_size": 32},
    "cuda": {"width": 2048, "heads": 16, "length": 1024, "batch_size": 64},
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
    parser.add_argument("--schedule", choices=SCHEDULES, default="1F1B")
    parser.add_argument("--microbatches", type=int, help="that a batch is cut into (default: four a rank)")
    parser.add_argument("--layers", type=int, default=8, help="in the whole model (default: 8)")
    parser.add_argument("--split", type=counts, metavar="N,N,...", help="layers of each stage (default: shared evenly)")
    parser.add_argument("--width", type=int)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--vocabulary", type=int, default=128, help="tokens (default: 128)")
    parser.add_argument("--length", type=int, help="of a sequence, tokens")
    parser.add_argument("--batch-size", type=int, help="sequences a step")
    parser.add_argument("--steps", type=int, default=60, help="(default: 60)")
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate (default: 0.001)")
    parser.add_argument("--log-every", type=int, default=20, metavar="N", help="steps (default: 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fault", choices=list(FAULTS), help="plant this mistake")
    args = parser.parse_args(argv)

    args.rank, args.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    args.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.world < 2:
        parser.error(f"a pipeline needs two ranks: torchrun --nproc-per-node 2 {parser.prog} ...")
    if args.microbatches is None:
        args.microbatches = 4 * args.world
    if args.schedule == "Naive":
        args.microbatches = 1
    if args.fault == "few_microbatches":
        args.microbatches = args.world
    if args.batch_size % args.microbatches:
        parser.error(f"--batch-size {args.batch_size} cannot be cut into {args.microbatches} micro-batches")
    stages = args.world * (1 if args.schedule in ONE_STAGE_A_RANK else 2)
    if args.split is None:
        args.split = share_out(args.layers, stages)
        if args.fault == "uneven_split":
            half = [n // 2 for n in args.split[:-1]]
            args.split = [*half, args.layers - sum(half)]
    if len(args.split) != stages or sum(args.split) != args.layers:
        split = ",".join(map(str, args.split))
        parser.error(
            f"--split {split}: {args.schedule} on {args.world} ranks has {stages} stages of {args.layers} layers"
        )
    return args


def counts(text: str) -> list[int]:
    """Read numbers that commas separate."""
    return [int(n) for n in text.split(",")]


def build_schedule(args: argparse.Namespace, device: torch.device) -> tuple[schedules._PipelineSchedule, list[Stage]]:
    """Return this rank's part of the pipeline, and its modules."""
    mine = stages_of(args.rank, args.world, args.schedule)
    count = len(mine) * args.world
    modules, stages = [], []
    for index in mine:
        torch.manual_seed(args.seed + index)
        module = Stage(args, args.split[index], first=index == 0, last=index == count - 1).to(device)
        modules.append(module)
        stages.append(PipelineStage(module, index, count, device))
    make = getattr(schedules, "ScheduleGPipe" if args.schedule == "Naive" else f"Schedule{args.schedule}")
    return make(stages if len(mine) > 1 else stages[0], args.microbatches, loss_fn=loss_of), modules


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next token."""
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def main() -> None:
    args = parse()
    device = torch.device(f"cuda:{args.local_rank}" if args.device == "cuda" else "cpu")
    if args.device == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    if args.rank == 0:
        print(
            f"{args.layers} layers of {args.width} over {args.world} ranks on {args.device}, {args.schedule}, batch"
            f" {args.batch_size} in {args.microbatches} micro-batches, layers a stage"
            f" {','.join(map(str, args.split))}, fault: {args.fault or 'none'}",
            flush=True,
        )
    schedule, modules = build_schedule(args, device)
    first = any(module.token is not None for module in modules)
    last = any(module.head is not None for module in modules)
    optimizer = torch.optim.AdamW((p for m in modules for p in m.parameters()), args.lr, fused=True)

    # The first and the last stage read the same sequences; the others count along.
    loader = DataLoader(Counting(args.vocabulary, args.length, args.seed), args.batch_size)
    logged_at = time.perf_counter()
    for step, sequences in enumerate(loader, start=1):
        tokens = sequences.to(device, non_blocking=True)
        losses: list[Tensor] | None = [] if last else None
        schedule.step(
            *([tokens[:, :-1]] if first else []), **({"target": tokens[:, 1:], "losses": losses} if last else {})
        )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        if step % args.log_every == 0 and losses:
            value = torch.stack(losses).mean().item()  # waits for the device, so not at every step
            now = time.perf_counter()
            rate = args.log_every * args.batch_size / (now - logged_at)
            print(f"step {step}  loss {value:.4f}  {rate:.0f} sequences/s", flush=True)
            logged_at = now
        if step == args.steps:
            break

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
