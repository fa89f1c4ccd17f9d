"""Pretrain an encoder to guess masked words, over several batches an optimizer step, well, or with one of FAULTS.

    python workloads/bert_pretrain.py                                  one process
    torchrun --nproc-per-node 2 workloads/bert_pretrain.py             one process a GPU, or a CPU rank each
    python workloads/bert_pretrain.py --optimizer lamb --accumulate 8  large batches
    python workloads/bert_pretrain.py --fault loop_optimizer

The text is made up: each sentence speaks of one topic, and each topic has words of its own, so that a masked word
can be guessed from its neighbours and the loss falls.
"""

from __future__ import annotations

import argparse
import contextlib
import threading
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from parts.job import Log, announce, autocast, options, ranks, read
from parts.optimizers import Lamb
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

# ---- the faults ----------------------------------------------------------------------------------------------------

# What can be planted, and the dlprof rule that must notice it. plant() has a line for each.
FAULTS = {
    "boolean_mask": "host_sync",  # masked words are picked by a mask: how many there are, only the GPU knows
    "busy_thread": "busy_thread",  # a thread looks all the time whether anything is to be said
    "kept_outputs": "growing_steps",  # how often it was right so far is computed of all outputs, which are kept
    "loop_optimizer": "unfused_optimizer",  # AdamW takes one parameter after the other
    "padded": "padding",  # sentences are padded to four times the longest of their batch
    "sync_every_batch": "exposed_communication",  # gradients are exchanged for every batch, not once they add up
}
# Options under which it is healthy as well.
HEALTHY = {"lamb": "--optimizer lamb"}
# What else a fault needs, to cost more than a little.
SHOWN_WITH = {
    "loop_optimizer": "--layers 12 --width 64 --length 32 --batch-size 4 --accumulate 1",
    "sync_every_batch": "--vocabulary 40001 --layers 1 --length 16 --batch-size 2 --accumulate 4",
}
NEEDS_GPU = ("boolean_mask",)  # nothing waits for a CPU
NEEDS_TWO_RANKS = ("sync_every_batch",)


def plant(args: argparse.Namespace) -> None:
    """Change the settings of a healthy run into those of a run with args.fault. No other code asks for the fault."""
    healthy: dict[str, Any] = {
        "choose": lambda _tokens, places: places,
        "padded": args.length,
        "score_all": False,
        "watch_s": 1.0,
        "sync_every_batch": False,
    }
    faulty: dict[str, dict[str, Any]] = {
        "boolean_mask": {"choose": as_mask},
        "busy_thread": {"watch_s": 0.0},
        "kept_outputs": {"score_all": True},
        "loop_optimizer": {"optimizer": "adamw", "how": "loop"},
        "padded": {"padded": 4 * args.length},
        "sync_every_batch": {"sync_every_batch": True},
    }
    vars(args).update(healthy | faulty.get(args.fault, {}))


def as_mask(tokens: Tensor, places: Tensor) -> Tensor:
    """Return a mask (batch × length) of the places (batch × hidden)."""
    return torch.zeros_like(tokens, dtype=torch.bool).scatter_(1, places, True)


# ---- the text ------------------------------------------------------------------------------------------------------

MASK = 0  # the word that stands for one to guess
TOPICS = 20


def make_text(sentences: int, length: int, vocabulary: int, seed: int) -> Tensor:
    """Return sentences of so many words, each of its topic's words, some far more common than others (Zipf's law)."""
    rng = np.random.default_rng(seed)
    each = (vocabulary - 1) // TOPICS
    topics = rng.integers(0, TOPICS, (sentences, 1))
    words = (rng.zipf(1.3, (sentences, length)) - 1) % each
    return torch.from_numpy(1 + topics * each + words)


class Masking:
    """Hides words of a batch, to be guessed (Devlin et al., BERT, 2018), and pads its sentences to a length."""

    def __init__(self, vocabulary: int, length: int, padded: int = 0) -> None:
        self.vocabulary, self.hidden = vocabulary, max(1, round(0.15 * length))  # as many in each sentence
        self.padded = padded or length

    def __call__(self, sentences: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the batch with hidden words (batch × length), where they are, and what they were (batch × hidden).

        And, where sentences are padded, a mask of the padding (batch × length).
        """
        tokens = torch.stack(sentences)
        places = torch.rand(tokens.shape).argsort(1)[:, : self.hidden].sort(1).values
        words = tokens.gather(1, places)
        dice = torch.rand(places.shape)
        shown = torch.where(dice < 0.9, torch.randint(1, self.vocabulary, words.shape), words)  # one in ten stays
        tokens = tokens.scatter(1, places, torch.where(dice < 0.8, MASK, shown))
        length = tokens.shape[1]
        if self.padded == length:
            return tokens, places, words
        padding = torch.arange(self.padded).expand(len(tokens), -1) >= length
        return F.pad(tokens, (0, self.padded - length)), places, words, padding


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

    def forward(self, tokens: Tensor, chosen: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return logits, words × vocabulary, of those at `chosen`: places (batch × hidden) or mask (batch × length).

        No word looks at where `padding` (batch × length) is True.
        """
        x = self.norm(self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device)))
        for block in self.blocks:
            x = block(x, src_key_padding_mask=padding)
        if chosen.dtype == torch.bool:
            x = x[chosen]
        else:
            x = x.gather(1, chosen[..., None].expand(-1, -1, x.shape[2])).flatten(0, 1)
        return F.linear(self.guess(x), self.token.weight, self.bias)


# ---- the options ---------------------------------------------------------------------------------------------------

# On a CPU core a batch then takes some 50 ms; the GPU's is BERT-large, whose batch keeps it busy.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"precision": "fp32", "layers": 4, "width": 128, "heads": 4, "length": 64, "vocabulary": 2001}
    | {"batch_size": 8, "accumulate": 2, "steps": 160},
    "cuda": {"precision": "bf16", "layers": 24, "width": 1024, "heads": 16, "length": 512, "vocabulary": 30528}
    | {"batch_size": 64, "accumulate": 4, "steps": 200},
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options, with those of the fault planted; a usage error exits with 2."""
    parser = options(__doc__, FAULTS)
    add = parser.add_argument
    add("--precision", choices=["fp32", "tf32", "bf16"])
    add("--layers", type=int)
    add("--width", type=int, help="of the model's features")
    add("--heads", type=int, help="of the attention; they share out the width")
    add("--vocabulary", type=int, help="words that the model tells apart")
    add("--length", type=int, help="of a sentence, words")
    add("--batch-size", type=int, help="sentences a rank and batch")
    add("--accumulate", type=int, metavar="N", help="batches an optimizer step")
    add("--steps", type=int, help="batches")
    add("--optimizer", choices=["adamw", "lamb"], default="adamw")
    add("--how", choices=["fused", "foreach", "loop"], default="fused", help="AdamW goes through weights")
    add("--lr", type=float, help="learning rate at its highest (default: adamw 0.001, lamb 0.01)")
    add("--warmup", type=int, default=10, metavar="N", help="optimizer steps to get there (default: 10)")
    add("--log-every", type=int, default=20, metavar="N", help="batches (default: 20)")
    args = read(parser, argv, DEFAULTS, NEEDS_GPU, NEEDS_TWO_RANKS)
    if args.lr is None:
        args.lr = {"adamw": 0.001, "lamb": 0.01}[args.optimizer]
    plant(args)
    if args.device == "cpu" and args.precision == "tf32":
        parser.error("--precision tf32 needs a GPU")
    if args.width % args.heads:
        parser.error(f"--width {args.width} cannot be shared out among {args.heads} heads")
    if args.vocabulary <= 10 * TOPICS:
        parser.error(f"--vocabulary {args.vocabulary} is too few for the words of {TOPICS} topics")
    if args.accumulate < 1:
        parser.error(f"--accumulate {args.accumulate}: one batch at least")
    return args


# ---- training: one rank --------------------------------------------------------------------------------------------


def build_loader(args: argparse.Namespace) -> DataLoader[Tensor]:
    """Return this rank's share of the text in batches, with words hidden anew each time."""
    text = make_text(args.steps * args.batch_size * args.world, args.length, args.vocabulary, args.seed)
    return DataLoader(
        text,  # type: ignore[arg-type] # has a length and items
        args.batch_size,
        sampler=DistributedSampler(text, args.world, args.rank, seed=args.seed),  # type: ignore[arg-type]
        collate_fn=Masking(args.vocabulary, args.length, args.padded),
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


def watch(seconds: float) -> None:
    """Look again and again whether the job still goes on, as monitors do."""
    looks = 0
    while True:
        looks += 1
        if seconds:
            time.sleep(seconds)


def train(args: argparse.Namespace) -> None:
    in_precision = autocast(args)
    torch.manual_seed(args.seed)  # the same model on every rank
    model: nn.Module = Encoder(args.vocabulary, args.padded, args.width, args.heads, args.layers).to(args.device)
    announce(
        args,
        f"{args.layers} layers of {args.width}, {sum(p.numel() for p in model.parameters()):,} parameters,"
        f" {args.world} ranks on {args.device}, batch {args.batch_size} × {args.accumulate} a rank, {args.precision},"
        f" {args.optimizer}",
    )
    optimizer = build_optimizer(args, model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / args.warmup))
    if args.world > 1:
        model = DistributedDataParallel(model, args.device_ids, gradient_as_bucket_view=True)
    torch.manual_seed(args.seed + args.rank)  # other words hidden on every rank

    log = Log(args, "sentences", args.batch_size * args.world)
    outputs, expected = [], []
    threading.Thread(target=watch, args=(args.watch_s,), daemon=True).start()
    for step, batch in enumerate(build_loader(args), start=1):
        tokens, places, words, *padding = (part.to(args.device, non_blocking=True) for part in batch)
        accumulating = step % args.accumulate > 0  # gradients stay on this rank, to be added to the next batch's
        keeps = accumulating and not args.sync_every_batch
        quiet = keeps and isinstance(model, DistributedDataParallel) and model.no_sync()
        with quiet or contextlib.nullcontext(), in_precision:
            output = model(tokens, args.choose(tokens, places), *padding)
            loss = F.cross_entropy(output, words.flatten())
        (loss / args.accumulate).backward()
        if not accumulating:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
        if args.score_all:
            outputs.append(output.detach())
            expected.append(words.flatten())
            (torch.cat(outputs).argmax(-1) == torch.cat(expected)).float().mean()
        log.step(step, loss)


def main() -> None:
    args = parse()
    with ranks(args):
        train(args)


if __name__ == "__main__":
    main()
