"""Train a language model whose every layer is cut up over several ranks, well, or with one of FAULTS planted.

    torchrun --nproc-per-node 2 workloads/tensor_parallel_gpt.py                         one model
    torchrun --nproc-per-node 4 workloads/tensor_parallel_gpt.py --tensor-parallel 2     two models of two
    torchrun --nproc-per-node 2 workloads/tensor_parallel_gpt.py --no-sequence-parallel
    torchrun --nproc-per-node 2 workloads/tensor_parallel_gpt.py --fault column_only

Linear layers come in pairs: the first is cut by columns and gives each rank some heads or features, the second by rows
and adds up what the ranks have. Between such pairs each rank keeps some of the sequence (sequence parallel), or all of
it. Each sequence counts through the vocabulary by a step of its own, so the loss falls once the model has seen which.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from parts.job import Log, announce, autocast, options, process_group, read
from parts.language import Counting
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader

# ---- the faults ----------------------------------------------------------------------------------------------------

# What can be planted, and the dlprof rule that must notice it. plant() has a line for each.
FAULTS = {
    "column_only": "exposed_communication",  # all layers are cut by columns, and every output is gathered
    "loop_optimizer": "unfused_optimizer",  # AdamW takes one parameter after the other
    "read_every_step": "host_sync",  # the loss is read in every step, and the GPU runs dry
    "tiny_batch": "small_collectives",  # so few tokens that what is exchanged is hardly worth a start
}
# Options under which it is healthy as well.
HEALTHY = {"replicated": "--no-sequence-parallel"}
# What else a fault needs, to cost more than a little: what is exchanged weighs more in a narrower model.
SHOWN_WITH = {"column_only": "--width 1024 --length 64 --batch-size 4"}
# A step with it does less than any healthy one: none says how long it would take without.
OTHER_STEP = ("tiny_batch",)
NEEDS_GPU = ("read_every_step", "tiny_batch")  # nothing waits for a CPU, and gloo's trace tells no sizes


def plant(args: argparse.Namespace) -> None:
    """Change the settings of a healthy run into those of a run with args.fault. No other code asks for the fault."""
    healthy: dict[str, Any] = {"adamw": {"fused": True}, "cut_up": cut_up, "after_step": lambda _loss: None}
    faulty: dict[str, dict[str, Any]] = {
        "column_only": {"cut_up": cut_by_columns},
        "loop_optimizer": {"adamw": {"foreach": False}},
        "read_every_step": {"after_step": check_loss},
        "tiny_batch": {"batch_size": 1, "length": 16},
    }
    vars(args).update(healthy | faulty.get(args.fault, {}))


def cut_by_columns(model: Transformer, mesh: DeviceMesh, _args: argparse.Namespace) -> None:
    """Leave this rank some columns of every linear layer, in place; the output of each is gathered."""
    layers = ("attention.q", "attention.k", "attention.v", "attention.out", "feed.up", "feed.down")
    for block in model.blocks:
        parallelize_module(block, mesh, {name: ColwiseParallel(output_layouts=Replicate()) for name in layers})


def check_loss(loss: Tensor) -> None:
    if not loss.isfinite():
        raise ValueError("the loss is not finite")


# ---- the model: Radford et al., Language Models are Unsupervised Multitask Learners, 2019 --------------------------


class Attention(nn.Module):
    """Causal self-attention; as many heads as the features that this rank's part of the linear layers gives."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return features, batch × length × width, of features of the same shape."""
        q, k, v = (part(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """Two linear layers, the inner features four times as many."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return features, batch × length × width, of features of the same shape."""
        down: Tensor = self.down(F.gelu(self.up(x)))
        return down


class Block(nn.Module):
    """Attention and a feed-forward network, each after a norm and beside a way around."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.feed = Attention(width, heads), FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return features, batch × length × width, of features of the same shape."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.feed(self.norm2(x))
        return out


class Transformer(nn.Module):
    """Predicts each next token of a sequence from those before it."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.token = nn.Embedding(args.vocabulary, args.width)
        self.place = nn.Embedding(args.length, args.width)
        self.blocks = nn.ModuleList(Block(args.width, args.heads) for _ in range(args.layers))
        self.norm, self.head = nn.LayerNorm(args.width), nn.Linear(args.width, args.vocabulary)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Return the logits, batch × length × vocabulary, of tokens (batch × length) and their places (1 × length)."""
        x = self.token(tokens) + self.place(places)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def cut_up(model: Transformer, mesh: DeviceMesh, args: argparse.Namespace) -> None:
    """Leave this rank its part of every layer, in place."""
    along = Shard(1)  # the dimension of the sequence
    kept = along if args.sequence_parallel else Replicate()  # how features lie between pairs of layers
    # Whole once for all layers of a pair: else the gradients of q, k and v are added up one after the other.
    whole = PrepareModuleInput(input_layouts=(kept,), desired_input_layouts=(Replicate(),))
    plan: dict[str, Any] = {
        "attention": whole,
        "feed": whole,
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=kept),
        "feed.up": ColwiseParallel(),
        "feed.down": RowwiseParallel(output_layouts=kept),
    }
    if args.sequence_parallel:
        plan |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    # The embeddings are small: each rank has them whole, and goes on with its part of the sequence.
    own = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=kept)
    parallelize_module(
        model,
        mesh,
        {
            "token": own,
            "place": own,
            **({"norm": SequenceParallel()} if args.sequence_parallel else {}),
            "head": ColwiseParallel(input_layouts=kept, output_layouts=Replicate()),
        },
    )


def add_up(model: nn.Module, mesh: DeviceMesh) -> None:
    """Return every rank the whole gradients of norms and biases, of which each has those of its part of the sequence.

    In one exchange. The optimizer would have them added up as well, one after the other.
    """
    parts = {p: p.grad for p in model.parameters() if isinstance(p.grad, DTensor) and p.grad.placements == (Partial(),)}
    if not parts:
        return
    summed = torch.cat([part.to_local().flatten() for part in parts.values()])
    dist.all_reduce(summed, group=mesh.get_group())
    for p, gradient in zip(parts, summed.split_with_sizes([p.numel() for p in parts]), strict=True):
        p.grad = DTensor.from_local(gradient.view(p.shape), mesh, (Replicate(),), run_check=False)


# ---- the options ---------------------------------------------------------------------------------------------------

# On two CPU cores a step then takes some 650 ms. What is computed grows with the square of the width, what is exchanged
# with the width: only a wide model is worth its exchanges there. A GPU's width keeps it busy.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"precision": "fp32", "layers": 1, "width": 3072, "heads": 16, "length": 48, "batch_size": 2, "steps": 40},
    "cuda": {"precision": "bf16", "layers": 24, "width": 4096, "heads": 32}
    | {"length": 2048, "batch_size": 8, "steps": 100},
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options, with those of the fault planted; a usage error exits with 2."""
    parser, switch = options(__doc__, FAULTS), argparse.BooleanOptionalAction
    add = parser.add_argument
    add("--tensor-parallel", type=int, metavar="N", help="ranks that share a model; the rest is data parallel (all)")
    sequence_help = "share out the sequence between pairs of layers, too (default)"
    add("--sequence-parallel", action=switch, default=True, help=sequence_help)
    add("--precision", choices=["fp32", "bf16"], help="of the products; parameters stay in fp32")
    add("--layers", type=int)
    add("--width", type=int, help="of the model's features")
    add("--heads", type=int, help="of the attention; they share out the width, and the ranks share them")
    add("--vocabulary", type=int, default=256, help="tokens (default: 256)")
    add("--length", type=int, help="of a sequence, tokens")
    add("--batch-size", type=int, help="sequences a model and step")
    add("--steps", type=int)
    add("--lr", type=float, default=0.001, help="learning rate (default: 0.001)")
    add("--log-every", type=int, default=20, metavar="N", help="steps (default: 20)")
    args = read(parser, argv, DEFAULTS, NEEDS_GPU)
    if args.world < 2:
        parser.error(f"tensor parallelism needs two ranks: torchrun --nproc-per-node 2 {parser.prog} ...")
    if args.tensor_parallel is None:
        args.tensor_parallel = args.world
    if args.tensor_parallel < 1 or args.world % args.tensor_parallel:
        parser.error(f"--tensor-parallel {args.tensor_parallel} does not divide {args.world} ranks")
    plant(args)
    for name in ("heads", "length", "vocabulary"):
        if getattr(args, name) % args.tensor_parallel:
            parser.error(f"--{name} {getattr(args, name)} cannot be shared out among {args.tensor_parallel} ranks")
    if args.width % args.heads:
        parser.error(f"--width {args.width} cannot be shared out among {args.heads} heads")
    return args


# ---- training: one rank --------------------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    # Ranks next to each other share a model: they exchange most, and sit on one host.
    copies = args.world // args.tensor_parallel
    mesh = init_device_mesh(args.device, (copies, args.tensor_parallel), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(args.seed)  # the same on every rank
    model = Transformer(args).to(args.device)
    announce(
        args,
        f"{args.layers} layers of {args.width}, {sum(p.numel() for p in model.parameters()):,} parameters, cut up over"
        f" {args.tensor_parallel} ranks, {copies} times, on {args.device}, batch {args.batch_size} × {args.length},"
        f" {args.precision}",
    )
    args.cut_up(model, mesh["tensor"], args)
    if copies > 1:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    # Layers that are cut up, and others, which a fused step cannot take together.
    cut = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    groups = [{"params": some} for some in (cut, whole) if some]
    optimizer = torch.optim.AdamW(groups, args.lr, weight_decay=0.1, **args.adamw)

    # The ranks that share a model read the same sequences.
    loader = DataLoader(
        Counting(args.vocabulary, args.length, args.seed + args.rank // args.tensor_parallel),
        args.batch_size,
        pin_memory=args.device == "cuda",
    )
    places = torch.arange(args.length, device=args.device).unsqueeze(0)
    in_precision = autocast(args)
    log = Log(args, "tokens", args.batch_size * copies * args.length)
    for step, sequences in enumerate(loader, start=1):
        tokens = sequences.to(args.device, non_blocking=True)
        with in_precision:
            logits = model(tokens[:, :-1], places)
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        add_up(model, mesh["tensor"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        args.after_step(loss)
        log.step(step, loss)
        if step == args.steps:
            break


def main() -> None:
    args = parse()
    with process_group(args):
        train(args)


if __name__ == "__main__":
    main()
