"""Pretrain an encoder to guess masked words, over several batches an optimizer step, well, or with one of FAULTS.

    python workloads/bert_pretrain.py                                  one process
    torchrun --nproc-per-node 2 workloads/bert_pretrain.py             one process a GPU, or a CPU rank each
    python workloads/bert_pretrain.py --optimizer lamb --accumulate 8  large batches
    python workloads/bert_pretrain.py --fault loop_optimizer

The text is made up: each sentence speaks of one topic, and each topic has words of its own, so that a masked word
can be guessed from its neighbours and the loss falls. Plain PyTorch: any profiler can be pointed at it, and none is
imported.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

# What can be planted, and the dlprof rule that must notice it. Each is one `if args.fault == ...` below.
FAULTS = {
    "boolean_mask": "host_sync",  # masked words are picked by a mask: how many there are, only the GPU knows
    "loop_optimizer": "unfused_optimizer",  # AdamW takes one parameter after the other
    "sync_every_batch": "exposed_communication",  # gradients are exchanged for every batch, not once they add up
}
# Options under which it is healthy as well.
HEALTHY = {"lamb": "--optimizer lamb"}
# What else a fault needs, to cost more than a little.
SHOWN_WITH = {
    "loop_optimizer": "--layers 12 --width 64 --length 32 --batch-size 4 --accumulate 1",
    "sync_every_batch": "--vocabulary 40001 --layers 1 --length 16 --batch-size 2 --accumulate 4",
}
NEEDS_GPU = ("boolean_mask",)
NEEDS_TWO_RANKS = ("sync_every_batch",)

MASK = 0  # the word that stands for one to guess
TOPICS = 20


# ---- the text ------------------------------------------------------------------------------------------------------


def make_text(sentences: int, length: int, vocabulary: int, seed: int) -> Tensor:
    """Return sentences of so many words, each of its topic's words, some far more common than others (Zipf's law)."""
    rng = np.random.default_rng(seed)
    each = (vocabulary - 1) // TOPICS
    topics = rng.integers(0, TOPICS, (sentences, 1))
    words = (rng.zipf(1.3, (sentences, length)) - 1) % each
    return torch.from_numpy(1 + topics * each + words)


class Masking:
    """Hides words of a batch, to be guessed: Devlin et al., BERT, 2018."""

    def __init__(self, vocabulary: int, length: int) -> None:
        self.vocabulary, self.hidden = vocabulary, max(1, round(0.15 * length))  # as many in each sentence

    def __call__(self, sentences: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the batch with hidden words (batch × length), where they are, and what they were (batch × hidden)."""
        tokens = torch.stack(sentences)
        places = torch.rand(tokens.shape).argsort(1)[:, : self.hidden].sort(1).values
        words = tokens.gather(1, places)
        dice = torch.rand(places.shape)
        shown = torch.where(dice < 0.9, torch.randint(1, self.vocabulary, words.shape), words)  # one in ten stays
        return tokens.scatter(1, places, torch.where(dice < 0.8, MASK, shown)), places, words


# ---- the model: Devlin et al., BERT: Pre-training of Deep Bidirectional Transformers, 2018 -------------------------


class Encoder(nn.Module):
    """Guesses hidden words from those on both sides."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, "gelu", batch_first=True) for _ in range(layers)
        )
        self.guess = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """Return logits, words × vocabulary, of those at `chosen`: places (batch × hidden) or mask (batch × length)."""
        x = self.norm(self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device)))
        for block in self.blocks:
            x = block(x)
        if chosen.dtype == torch.bool:  # fault boolean_mask
            x = x[chosen]
        else:
            x = x.gather(1, chosen[..., None].expand(-1, -1, x.shape[2])).flatten(0, 1)
        return F.linear(self.guess(x), self.token.weight, self.bias)


# ---- the optimizer for large batches: You et al., Large Batch Optimization for Deep Learning, 2019 -----------------


class Lamb(torch.optim.Optimizer):
    """Adam in which each layer's step is scaled to the size of its weights (LAMB)."""

    def __init__(self, parameters: Any, lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "step": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override] # noqa: ARG002 - nobody passes one
        """Update every weight that has a gradient; all of them at once in each term of the formula."""
        for group in self.param_groups:
            group["step"] += 1
            weights = [p for p in group["params"] if p.grad is not None]
            gradients = [p.grad for p in weights]
            means = [self.state[p].setdefault("mean", torch.zeros_like(p)) for p in weights]
            squares = [self.state[p].setdefault("square", torch.zeros_like(p)) for p in weights]
            torch._foreach_lerp_(means, gradients, 0.1)
            torch._foreach_mul_(squares, 0.999)
            torch._foreach_addcmul_(squares, gradients, gradients, 0.001)
            roots = torch._foreach_sqrt(torch._foreach_div(squares, 1 - 0.999 ** group["step"]))
            torch._foreach_add_(roots, 1e-6)
            steps = torch._foreach_div(torch._foreach_div(means, 1 - 0.9 ** group["step"]), roots)
            torch._foreach_add_(steps, weights, alpha=group["weight_decay"])
            sizes = torch.stack(torch._foreach_norm(weights))
            lengths = torch.stack(torch._foreach_norm(steps))
            trusted = torch.where((sizes > 0) & (lengths > 0), sizes / lengths, 1.0)
            torch._foreach_mul_(steps, list(trusted.unbind()))
            torch._foreach_add_(weights, steps, alpha=-group["lr"])


# ---- one rank ------------------------------------------------------------------------------------------------------

# On a CPU core a batch then takes some 50 ms; the GPU's is BERT-large, whose batch keeps it busy.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "precision": "fp32",
        "layers": 4,
        "width": 128,
        "heads": 4,
        "length": 64,
        "vocabulary": 2001,
        "batch_size": 8,
        "accumulate": 2,
        "steps": 160,
    },
    "cuda": {
        "precision": "bf16",
        "layers": 24,
        "width": 1024,
        "heads": 16,
        "length": 512,
        "vocabulary": 30528,
        "batch_size": 64,
        "accumulate": 4,
        "steps": 200,
    },
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
    parser.add_argument("--precision", choices=["fp32", "tf32", "bf16"])
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int, help="of the model's features")
    parser.add_argument("--heads", type=int, help="of the attention; they share out the width")
    parser.add_argument("--vocabulary", type=int, help="words that the model tells apart")
    parser.add_argument("--length", type=int, help="of a sentence, words")
    parser.add_argument("--batch-size", type=int, help="sentences a rank and batch")
    parser.add_argument("--accumulate", type=int, metavar="N", help="batches an optimizer step")
    parser.add_argument("--steps", type=int, help="batches")
    parser.add_argument("--optimizer", choices=["adamw", "lamb"], default="adamw")
    parser.add_argument(
        "--how", choices=["fused", "foreach", "loop"], default="fused", help="AdamW goes through weights"
    )
    parser.add_argument("--lr", type=float, help="learning rate at its highest (default: adamw 0.001, lamb 0.01)")
    parser.add_argument(
        "--warmup", type=int, default=10, metavar="N", help="optimizer steps to get there (default: 10)"
    )
    parser.add_argument("--log-every", type=int, default=20, metavar="N", help="batches (default: 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fault", choices=list(FAULTS), help="plant this mistake")
    args = parser.parse_args(argv)

    # torchrun says who we are; without it we are the only rank.
    args.rank, args.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    args.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.lr is None:
        args.lr = {"adamw": 0.001, "lamb": 0.01}[args.optimizer]
    if args.fault == "loop_optimizer":
        args.optimizer, args.how = "adamw", "loop"
    if args.fault in NEEDS_GPU and args.device != "cuda":
        parser.error(f"--fault {args.fault} needs a GPU: a CPU waits for nobody")
    if args.fault in NEEDS_TWO_RANKS and args.world < 2:
        parser.error(f"--fault {args.fault} needs two ranks: torchrun --nproc-per-node 2 {parser.prog} ...")
    if args.device == "cpu" and args.precision == "tf32":
        parser.error("--precision tf32 needs a GPU")
    if args.width % args.heads:
        parser.error(f"--width {args.width} cannot be shared out among {args.heads} heads")
    if args.vocabulary <= 10 * TOPICS:
        parser.error(f"--vocabulary {args.vocabulary} is too few for the words of {TOPICS} topics")
    if args.accumulate < 1:
        parser.error(f"--accumulate {args.accumulate}: one batch at least")
    return args


def build_loader(args: argparse.Namespace) -> DataLoader[Tensor]:
    """Return this rank's share of the text in batches, with words hidden anew each time."""
    text = make_text(args.steps * args.batch_size * args.world, args.length, args.vocabulary, args.seed)
    return DataLoader(
        text,  # type: ignore[arg-type] # has a length and items
        args.batch_size,
        sampler=DistributedSampler(text, args.world, args.rank, seed=args.seed),  # type: ignore[arg-type]
        collate_fn=Masking(args.vocabulary, args.length),
        pin_memory=args.device == "cuda",
        drop_last=True,
    )


def build_optimizer(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer; what is no matrix decays as little as in the papers: not at all."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if args.optimizer == "lamb":
        return Lamb(groups, args.lr, 0.01)
    how = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}[args.how]
    return torch.optim.AdamW(groups, args.lr, **how)  # type: ignore[arg-type]


def autocast(args: argparse.Namespace) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which the forward pass runs in 16 bits, or one that does nothing."""
    return torch.autocast(args.device, torch.bfloat16) if args.precision == "bf16" else contextlib.nullcontext()


def no_sync(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Return the context whose forward passes leave their gradients on this rank, to be added to the next batch's."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext()


def main() -> None:
    args = parse()
    if args.device == "cuda":
        torch.cuda.set_device(args.local_rank)
        torch.backends.cuda.matmul.allow_tf32 = args.precision == "tf32"
    if args.world > 1:
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    torch.manual_seed(args.seed)  # the same model on every rank
    model: nn.Module = Encoder(args.vocabulary, args.length, args.width, args.heads, args.layers).to(args.device)
    if args.rank == 0:
        count = sum(p.numel() for p in model.parameters())
        print(
            f"{args.layers} layers of {args.width}, {count:,} parameters, {args.world} ranks on {args.device}, batch"
            f" {args.batch_size} × {args.accumulate} a rank, {args.precision}, {args.optimizer}, fault:"
            f" {args.fault or 'none'}",
            flush=True,
        )
    optimizer = build_optimizer(args, model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / args.warmup))
    if args.world > 1:
        model = DistributedDataParallel(
            model, device_ids=[args.local_rank] if args.device == "cuda" else None, gradient_as_bucket_view=True
        )
    torch.manual_seed(args.seed + args.rank)  # other words hidden on every rank

    logged_at = time.perf_counter()
    for step, batch in enumerate(build_loader(args), start=1):
        tokens, places, words = (part.to(args.device, non_blocking=True) for part in batch)
        chosen = places
        if args.fault == "boolean_mask":
            chosen = torch.zeros_like(tokens, dtype=torch.bool).scatter_(1, places, True)
        accumulating = step % args.accumulate > 0
        quiet = accumulating and args.fault != "sync_every_batch"
        with no_sync(model) if quiet else contextlib.nullcontext(), autocast(args):
            loss = F.cross_entropy(model(tokens, chosen), words.flatten())
        (loss / args.accumulate).backward()
        if not accumulating:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)

        if step % args.log_every == 0 and args.rank == 0:
            value = loss.item()  # waits for the device, so not at every step
            now = time.perf_counter()
            rate = args.log_every * args.batch_size * args.world / (now - logged_at)
            print(f"step {step}  loss {value:.4f}  {rate:,.0f} sentences/s", flush=True)
            logged_at = now

    # Before its group: the other way round, PyTorch 2.13 and gloo's threads may wait for each other for ever.
    del model
    if args.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
