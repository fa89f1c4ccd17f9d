"""Train a language model with a mixture of experts in every block, well, or with one of FAULTS planted.

    torchrun --nproc-per-node 2 workloads/moe_transformer.py                    the experts spread over two ranks
    torchrun --nproc-per-node 4 workloads/moe_transformer.py --experts 8        over four, two on each
    torchrun --nproc-per-node 2 workloads/moe_transformer.py --fault imbalance  most tokens go to the first rank's

A router sends each token to the experts that it scores highest: by an all-to-all to the ranks that hold them, and by
another one back. All else is the same on every rank, and its gradients are averaged by DistributedDataParallel. Each
sequence counts through the vocabulary by a step of its own, so the loss falls once the model has seen which.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from parts.exchanges import exchange, to_owners
from parts.job import Log, announce, autocast, options, process_group, read
from parts.language import Counting, causal_attention
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

# ---- the faults ----------------------------------------------------------------------------------------------------

# What can be planted, and the dlprof rule that must notice it. plant() has a line for each.
FAULTS = {
    "imbalance": "expert_imbalance",  # the router prefers the first rank's experts, and nothing balances them
    "loop_optimizer": "unfused_optimizer",  # AdamW takes one parameter after the other
}
# What else a fault needs, to cost more than a little: many parameters for a step of few tokens.
SHOWN_WITH = {"loop_optimizer": "--width 64 --length 16 --batch-size 2 --experts 32 --layers 4"}
NEEDS_TWO_RANKS = ("imbalance",)


def plant(args: argparse.Namespace) -> None:
    """Change the settings of a healthy run into those of a run with args.fault. No other code asks for the fault."""
    healthy: dict[str, Any] = {"adamw": {"fused": True}, "balance": balance, "preference": 0.0}
    faulty: dict[str, dict[str, Any]] = {
        "imbalance": {"balance": lambda _bias, _counts: None, "preference": 0.2},
        "loop_optimizer": {"adamw": {"foreach": False}},
    }
    vars(args).update(healthy | faulty.get(args.fault, {}))


# ---- the model -----------------------------------------------------------------------------------------------------


def balance(bias: Tensor, counts: Tensor) -> None:
    """Make experts with more tokens than the mean, on all ranks, a little less likely to be chosen, and others more.

    Wang et al., Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts, 2024.
    """
    everywhere = counts.float()
    dist.all_reduce(everywhere)
    apart = everywhere / everywhere.mean() - 1
    bias -= 0.05 * apart.clamp(-1, 1)


class Experts(nn.Module):
    """A feed-forward network of which each token goes through the `top` experts that the router scores highest.

    Shazeer et al., Outrageously Large Neural Networks, 2017. Each rank has as many experts, in the order of the ranks.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.world, self.top, self.balance = args.world, args.top, args.balance
        self.here = args.experts // args.world
        self.router = nn.Linear(args.width, args.experts, bias=False)
        # Decides who is chosen, and not how much that one's answer counts.
        self.register_buffer("bias", torch.zeros(args.experts))
        self.bias: Tensor
        self.bias[: self.here] += args.preference
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(args.width, 4 * args.width), nn.GELU(), nn.Linear(4 * args.width, args.width))
            for _ in range(self.here)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return features, tokens × width, of features of the same shape."""
        scores = self.router(x).softmax(-1)
        chosen = (scores + self.bias).topk(self.top, -1).indices
        weights = scores.gather(1, chosen).flatten()
        order = chosen.flatten().argsort(stable=True)  # tokens in the order of their experts, and so of the ranks
        counts = chosen.flatten().bincount(minlength=len(self.bias))
        coming = exchange(counts, [self.here] * self.world, [self.here] * self.world).view(self.world, self.here)
        give, take = counts.view(self.world, self.here).sum(1).tolist(), coming.sum(1).tolist()
        if self.training:
            self.balance(self.bias, counts)

        came = to_owners(x[order // self.top], give, take)
        # They came by rank and, of each, by expert: each expert's are put together.
        which = torch.arange(self.here, device=x.device).repeat(self.world).repeat_interleave(coming.flatten())
        by_expert = which.argsort(stable=True)
        pieces = came[by_expert].split_with_sizes(coming.sum(0).tolist())
        through = torch.cat([expert(piece) for expert, piece in zip(self.experts, pieces, strict=True)])
        back = to_owners(through[by_expert.argsort()], take, give)
        weighed = back * weights[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, order // self.top, weighed.to(x.dtype))


class Block(nn.Module):
    """Causal self-attention and a mixture of experts, each after a norm and beside a way around."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.heads = args.heads
        self.norm1, self.norm2 = nn.LayerNorm(args.width), nn.LayerNorm(args.width)
        self.qkv, self.out = nn.Linear(args.width, 3 * args.width), nn.Linear(args.width, args.width)
        self.feed = Experts(args)

    def forward(self, x: Tensor) -> Tensor:
        """Return features, batch × length × width, of features of the same shape."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        x = x + self.out(causal_attention(q, k, v).transpose(1, 2).reshape(batch, length, width))
        fed: Tensor = self.feed(self.norm2(x).flatten(0, 1))
        return x + fed.view_as(x)


class Transformer(nn.Module):
    """Predicts each next token of a sequence from those before it."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(args.vocabulary, args.width), nn.Embedding(args.length, args.width)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.layers))
        self.norm, self.head = nn.LayerNorm(args.width), nn.Linear(args.width, args.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits, one row a token, of tokens (batch × length)."""
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x).flatten(0, 1))
        return logits


# ---- the options ---------------------------------------------------------------------------------------------------

# On two CPU cores a step then takes some 600 ms. What is computed grows with the square of the width, what is exchanged
# with the width.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"precision": "fp32", "layers": 1, "width": 1024, "heads": 8, "experts": 4, "length": 64, "batch_size": 4}
    | {"steps": 60},
    "cuda": {"precision": "bf16", "layers": 12, "width": 2048, "heads": 16, "experts": 64, "length": 1024}
    | {"batch_size": 16, "steps": 100},
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options, with those of the fault planted; a usage error exits with 2."""
    parser = options(__doc__, FAULTS)
    add = parser.add_argument
    add("--precision", choices=["fp32", "bf16"], help="of the products; parameters stay in fp32")
    add("--layers", type=int)
    add("--width", type=int, help="of the model's features")
    add("--heads", type=int, help="of the attention; they share out the width")
    add("--experts", type=int, help="of each layer; the ranks share them out")
    add("--top", type=int, default=2, help="experts that a token goes through (default: 2)")
    add("--vocabulary", type=int, default=256, help="tokens (default: 256)")
    add("--length", type=int, help="of a sequence, tokens")
    add("--batch-size", type=int, help="sequences a rank and step")
    add("--steps", type=int)
    add("--lr", type=float, default=0.001, help="learning rate (default: 0.001)")
    add("--log-every", type=int, default=20, metavar="N", help="steps (default: 20)")
    args = read(parser, argv, DEFAULTS, needs_two_ranks=NEEDS_TWO_RANKS)
    if args.experts % args.world:
        parser.error(f"--experts {args.experts} cannot be shared out among {args.world} ranks")
    if args.width % args.heads:
        parser.error(f"--width {args.width} cannot be shared out among {args.heads} heads")
    if not 1 <= args.top <= args.experts:
        parser.error(f"--top {args.top} must be from 1 to the number of experts, {args.experts}")
    plant(args)
    return args


# ---- training: one rank --------------------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    model = Transformer(args).to(args.device)
    of_experts = {name for name, _ in model.named_parameters() if ".experts." in name}
    experts = [p for name, p in model.named_parameters() if name in of_experts]
    torch.manual_seed(args.seed + args.rank)  # the experts are other ones on every rank; the rest is the same
    for name, layer in model.named_modules():
        if ".experts." in name and isinstance(layer, nn.Linear):
            layer.reset_parameters()
    announce(
        args,
        f"{args.layers} layers of {args.width}, {args.experts} experts, {sum(p.numel() for p in model.parameters()):,}"
        f" parameters a rank, on {args.device}, batch {args.batch_size} × {args.length} a rank, {args.precision}",
    )
    network: nn.Module = model
    if args.world > 1:
        # An expert gets its tokens, and so its gradients, from all ranks.
        own = [*of_experts, *dict(model.named_buffers())]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)  # type: ignore[no-untyped-call]
        network = DistributedDataParallel(model, args.device_ids)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0.1, **args.adamw)

    loader = DataLoader(
        Counting(args.vocabulary, args.length, args.seed + args.rank),
        args.batch_size,
        pin_memory=args.device == "cuda",
    )
    in_precision = autocast(args)
    log = Log(args, "tokens", args.batch_size * args.world * args.length)
    for step, sequences in enumerate(loader, start=1):
        tokens = sequences.to(args.device, non_blocking=True)
        with in_precision:
            loss = F.cross_entropy(network(tokens[:, :-1]), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch._foreach_div_([p.grad for p in experts if p.grad is not None], args.world)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        log.step(step, loss)
        if step == args.steps:
            break


def main() -> None:
    args = parse()
    with process_group(args):
        train(args)


if __name__ == "__main__":
    main()
