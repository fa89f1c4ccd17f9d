"""Train a small language model whose layers are spread over a pipeline, well, or with one of the mistakes in FAULTS.

    torchrun --nproc-per-node 2 workloads/pipeline_transformer.py                          a stage a GPU, or a CPU rank
    torchrun --nproc-per-node 2 workloads/pipeline_transformer.py --schedule Interleaved1F1B
    torchrun --nproc-per-node 2 workloads/pipeline_transformer.py --schedule Naive          one stage works at a time
    torchrun --nproc-per-node 2 workloads/pipeline_transformer.py --split 6,2              layers of each stage
    torchrun --nproc-per-node 2 workloads/pipeline_transformer.py --fault few_microbatches
    torchrun --nproc-per-node 4 workloads/pipeline_transformer.py --replicas 2             two pipelines, data parallel

Each sequence counts through the vocabulary by a step of its own, so the loss falls once the model has seen which.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from parts.job import Log, announce, options, process_group, read
from parts.language import Block, Counting
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

# What can be planted, and the dlprof rule that must notice it. plant() has a line for each.
FAULTS = {
    "few_microbatches": "pipeline_bubble",  # as many as there are ranks: the least that 1F1B takes
    "uneven_split": "stage_imbalance",  # the last stage has half of the others' layers besides its own
}

# What `dlprof run pipeline_transformer --ladder` records: options, each on top of those before; "ranks": on all ranks.
LADDER = {
    "naive": "--schedule Naive ranks",
    "gpipe": "--schedule GPipe",
    "1f1b": "--schedule 1F1B",
    "interleaved": "--schedule Interleaved1F1B",
    "zero_bubble": "--schedule InterleavedZeroBubble",
}


def plant(args: argparse.Namespace) -> None:
    """Change the settings of a healthy run into those of a run with args.fault. No other code asks for the fault."""
    half = [layers // 2 for layers in args.split[:-1]]
    faulty: dict[str, dict[str, Any]] = {
        "few_microbatches": {"microbatches": args.pipe},
        "uneven_split": {"split": [*half, args.layers - sum(half)]},
    }
    vars(args).update(faulty.get(args.fault, {}))


# ---- the schedules -------------------------------------------------------------------------------------------------

# Naive: the whole batch goes through one stage after the other, as a model does that is cut up and no more.
ONE_STAGE_A_RANK = ("Naive", "GPipe", "1F1B")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # the first and the last stage are on the same rank
SCHEDULES = (*ONE_STAGE_A_RANK, "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", *V_SHAPED)


def stages_of(rank: int, ranks: int, schedule: str) -> list[int]:
    """Return the stages that a rank holds, as its schedule wants them."""
    if schedule in ONE_STAGE_A_RANK:
        return [rank]
    return [rank, 2 * ranks - 1 - rank] if schedule in V_SHAPED else [rank, rank + ranks]


def share_out(layers: int, stages: int) -> list[int]:
    """Return how many layers each stage has; where they cannot be shared out evenly, the first stages have one more."""
    return [len(range(stage, layers, stages)) for stage in range(stages)]


# ---- the model -----------------------------------------------------------------------------------------------------


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


# ---- the options ---------------------------------------------------------------------------------------------------

# On two CPU cores a step then takes some 300 ms; a GPU's width keeps it busy.
DEFAULTS = {
    "cpu": {"width": 128, "heads": 4, "length": 64, "batch_size": 32},
    "cuda": {"width": 2048, "heads": 16, "length": 1024, "batch_size": 64},
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options, with those of the fault planted; a usage error exits with 2."""
    parser = options(__doc__, FAULTS)
    add = parser.add_argument
    add("--schedule", choices=SCHEDULES, default="1F1B")
    add("--microbatches", type=int, help="that a batch is cut into (default: four a rank)")
    add("--layers", type=int, default=8, help="in the whole model (default: 8)")
    add("--replicas", type=int, default=1, help="pipelines, each with sequences of its own (default: 1)")
    add("--split", type=counts, metavar="N,N,...", help="layers of each stage (default: shared evenly)")
    add("--width", type=int)
    add("--heads", type=int)
    add("--vocabulary", type=int, default=128, help="tokens (default: 128)")
    add("--length", type=int, help="of a sequence, tokens")
    add("--batch-size", type=int, help="sequences a step")
    add("--steps", type=int, default=60, help="(default: 60)")
    add("--lr", type=float, default=0.001, help="learning rate (default: 0.001)")
    add("--log-every", type=int, default=20, metavar="N", help="steps (default: 20)")
    args = read(parser, argv, DEFAULTS)
    if args.replicas < 1 or args.world % args.replicas or args.world // args.replicas < 2:
        pipelines = f" for each of {args.replicas} pipelines" if args.replicas > 1 else ""
        parser.error(f"a pipeline needs two ranks{pipelines}: torchrun --nproc-per-node 2 {parser.prog} ...")
    args.pipe = args.world // args.replicas  # ranks of each pipeline
    args.replica, args.place = divmod(args.rank, args.pipe)
    args.stages = args.pipe * (1 if args.schedule in ONE_STAGE_A_RANK else 2)
    args.split = args.split or share_out(args.layers, args.stages)
    args.microbatches = 1 if args.schedule == "Naive" else args.microbatches or 4 * args.pipe
    plant(args)
    if args.batch_size % args.microbatches:
        parser.error(f"--batch-size {args.batch_size} cannot be cut into {args.microbatches} micro-batches")
    if len(args.split) != args.stages or sum(args.split) != args.layers:
        split, asked = ",".join(map(str, args.split)), f"{args.schedule} on {args.pipe} ranks"
        parser.error(f"--split {split}: {asked} has {args.stages} stages of {args.layers} layers")
    return args


def counts(text: str) -> list[int]:
    """Read numbers that commas separate."""
    return [int(n) for n in text.split(",")]


# ---- training: one rank --------------------------------------------------------------------------------------------


def build_schedule(args: argparse.Namespace, device: torch.device) -> tuple[schedules._PipelineSchedule, list[Stage]]:
    """Return this rank's part of the pipeline, and its modules."""
    mine = stages_of(args.place, args.pipe, args.schedule)
    pipe, copies = groups(args)
    modules, stages = [], []
    for index in mine:
        torch.manual_seed(args.seed + index)
        module = Stage(args, args.split[index], first=index == 0, last=index == args.stages - 1).to(device)
        modules.append(module)
        # The schedule has gradients exchanged with the last micro-batch alone.
        wrapped = module if copies is None else DistributedDataParallel(module, args.device_ids, process_group=copies)
        stages.append(PipelineStage(wrapped, index, args.stages, device, group=pipe))
    make = getattr(schedules, "ScheduleGPipe" if args.schedule == "Naive" else f"Schedule{args.schedule}")
    return make(stages if len(mine) > 1 else stages[0], args.microbatches, loss_fn=loss_of), modules


def groups(args: argparse.Namespace) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Return the group of this rank's pipeline, and that of the ranks that hold the same stages; None: all, no such."""
    if args.replicas == 1:
        return None, None
    ranks = range(args.world)
    pipes = [dist.new_group([r for r in ranks if r // args.pipe == n]) for n in range(args.replicas)]
    copies = [dist.new_group([r for r in ranks if r % args.pipe == n]) for n in range(args.pipe)]
    return pipes[args.replica], copies[args.place]


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next token."""
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def train(args: argparse.Namespace) -> None:
    device = torch.device(f"cuda:{args.local_rank}" if args.device == "cuda" else "cpu")
    announce(
        args,
        f"{args.layers} layers of {args.width} over {args.pipe} ranks on {args.device}, {args.schedule}, batch"
        f" {args.batch_size} in {args.microbatches} micro-batches, layers a stage {','.join(map(str, args.split))}"
        + (f", {args.replicas} pipelines" if args.replicas > 1 else ""),
    )
    schedule, modules = build_schedule(args, device)
    first = any(module.token is not None for module in modules)
    last = any(module.head is not None for module in modules)
    optimizer = torch.optim.AdamW((p for m in modules for p in m.parameters()), args.lr, fused=True)

    # The first and the last stage read the same sequences; the others count along.
    loader = DataLoader(Counting(args.vocabulary, args.length, args.seed + 1_000 * args.replica), args.batch_size)
    log = Log(args, "sequences", args.batch_size * args.replicas)
    for step, sequences in enumerate(loader, start=1):
        tokens = sequences.to(device, non_blocking=True)
        losses: list[Tensor] | None = [] if last else None
        schedule.step(
            *([tokens[:, :-1]] if first else []), **({"target": tokens[:, 1:], "losses": losses} if last else {})
        )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        if losses and step % args.log_every == 0:
            log.line(step, torch.stack(losses).mean())
        if step == args.steps:
            break


def main() -> None:
    args = parse()
    with process_group(args):
        train(args)


if __name__ == "__main__":
    main()
