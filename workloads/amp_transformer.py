"""Train a byte-level language model in the precision of one's choice, well, or with one of the mistakes in FAULTS.

    python workloads/amp_transformer.py                                  one process
    torchrun --nproc-per-node 2 workloads/amp_transformer.py             one process a GPU, or a CPU rank each
    python workloads/amp_transformer.py --fault loop_optimizer

The text is made up: sentences of invented words, some far more common than others, so that the loss falls as the model
learns to spell.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from parts import by_hand
from parts.job import Log, announce, autocast, options, ranks, read
from parts.language import Block, causal_attention
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

# ---- the faults ----------------------------------------------------------------------------------------------------

# What can be planted, and the dlprof rule that must notice it. plant() has a line for each.
FAULTS = {
    "averages_by_hand": "parameter_loop",  # an average of the weights is kept, one weight after the other
    "blocks_again": "needless_recompute",  # the backward pass computes each block again, with memory to spare
    "data_parallel": "data_parallel",  # one process drives all GPUs, and copies the model to each in every step
    "empties_cache": "device_allocations",  # memory that PyTorch keeps for the next step is given back
    "find_unused": "unused_parameters",  # DDP looks for parameters without a gradient in every step: there are none
    "full_precision": "fp32_matmul",  # neither autocast nor TF32
    "gelu_by_hand": "unfused_activation",  # power, tanh, products: an operator each
    "logits_by_cat": "growing_cat",  # each sequence's logits are added to those before by cat
    "loss_by_hand": "unfused_loss",  # a softmax, its logarithm, and an index
    "looks_for_nan": "anomaly_mode",  # autograd's anomaly mode is on
    "loop_optimizer": "unfused_optimizer",  # AdamW takes one parameter after the other
    "norms_by_hand": "unfused_norm",  # mean, variance, root: an operator each
    "odd_shapes": "misaligned_shapes",  # widths and lengths that are no multiple of 8
    "one_hot_tokens": "one_hot_input",  # tokens as one-hot rows, multiplied by the embedding
    "restless_scale": "skipped_steps",  # the loss is scaled up every third step, until gradients overflow
    "scores_in_memory": "unfused_attention",  # attention by two products and a softmax
    "unequal_lengths": "unequal_lengths",  # every rank draws the length of its batches for itself
    "tiny_batch": "host_bound",  # so little work in each kernel that launching it takes longer
}
# Options under which it is healthy as well.
HEALTHY = {"varied": "--varied"}
# What else a fault needs, to cost more than a little.
SHOWN_WITH = {
    "averages_by_hand": "--width 256 --length 32 --batch-size 4",
    "find_unused": "--layers 12 --width 64 --length 16 --batch-size 2",
    "loop_optimizer": "--width 256 --length 32 --batch-size 4",
    "logits_by_cat": "--vocabulary 1024 --batch-size 96 --length 32 --layers 2",
    "loss_by_hand": "--vocabulary 4096 --layers 2",
    "one_hot_tokens": "--vocabulary 4096 --layers 2",
    "scores_in_memory": "--length 512 --batch-size 4 --layers 2",
    "unequal_lengths": "--length 256",
    "restless_scale": "--layers 1 --width 64 --heads 2 --length 32 --batch-size 8",  # a CPU is slow in fp16
}
# A step with it does less than any healthy one, or is as long: none says how long it would take without.
OTHER_STEP = ("restless_scale", "tiny_batch", "unequal_lengths")
# A CPU has neither tensor cores, nor launches, nor memory that is asked for and given back; beside its computing the
# search for unused parameters is nothing.
NEEDS_GPU = (
    "averages_by_hand", "blocks_again", "empties_cache", "find_unused", "full_precision", "looks_for_nan", "odd_shapes",
    "tiny_batch",
)  # fmt: skip
NEEDS_TWO_RANKS = ("find_unused", "unequal_lengths")
# What `dlprof run amp_transformer --ladder` records: options, each on top of those before; "ranks": on all ranks.
LADDER = {
    "fp32": "--precision fp32 --no-fused",
    "fused": "--fused",
    "bf16": "--precision bf16",
    "compile": "--compile",
    "two_ranks": "ranks",
}


def plant(args: argparse.Namespace) -> None:
    """Change the settings of a healthy run into those of a run with args.fault. No other code asks for the fault."""
    healthy = {"adamw": {"fused": args.fused}, "attend": causal_attention, "data_parallel": False, "find_unused": False}
    healthy |= {"norm": nn.LayerNorm, "embedding": nn.Embedding, "loss": F.cross_entropy, "predict": at_once}
    healthy |= {"activate": F.gelu, "anomalies": False, "own_lengths": False}
    healthy |= {"scaler": {}, "through": nn.Module.__call__, "after_step": lambda _: None}
    heads = max(1, args.heads - 1)
    odd_width = heads * ((args.width // heads - 1) | 1)
    faulty: dict[str, dict[str, Any]] = {
        "averages_by_hand": {"after_step": by_hand.Averages()},
        "blocks_again": {"through": functools.partial(checkpoint, use_reentrant=False)},
        "data_parallel": {"data_parallel": True},
        "empties_cache": {"after_step": lambda _: torch.cuda.empty_cache()},
        "find_unused": {"find_unused": True},
        "full_precision": {"precision": "fp32"},
        "gelu_by_hand": {"activate": by_hand.gelu},
        "logits_by_cat": {"predict": by_hand.in_pieces},
        "looks_for_nan": {"anomalies": True},
        "loss_by_hand": {"loss": by_hand.cross_entropy},
        "loop_optimizer": {"adamw": {"foreach": False}},
        "norms_by_hand": {"norm": by_hand.LayerNorm},
        "odd_shapes": {"vocabulary": 257, "heads": heads, "width": odd_width, "length": args.length - 1},
        "one_hot_tokens": {"embedding": by_hand.OneHot},
        # A fused AdamW on a GPU keeps to itself what it skips.
        "restless_scale": {"precision": "fp16", "scaler": {"growth_interval": 3}, "adamw": {"foreach": True}},
        "scores_in_memory": {"attend": scores_in_memory},
        "tiny_batch": {"batch_size": 1, "length": 64},
        "unequal_lengths": {"varied": True, "own_lengths": True},
    }
    vars(args).update(healthy | faulty.get(args.fault, {}))


def at_once(head: nn.Module, x: Tensor) -> Tensor:
    """Return the logits of features."""
    logits: Tensor = head(x)
    return logits


def scores_in_memory(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return what causal_attention returns, by way of a score for every pair of places."""
    length, width = q.shape[-2:]
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(width)
    return scores.masked_fill(later, -math.inf).softmax(-1).to(v.dtype) @ v


# ---- the text ------------------------------------------------------------------------------------------------------


def make_text(length: int, seed: int) -> bytes:
    """Return so many bytes of sentences whose words follow Zipf's law."""
    dice = random.Random(seed)
    syllables = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er")]
    words = ["".join(dice.choices(syllables, k=dice.randint(1, 3))) for _ in range(500)]
    weights = [1 / place for place in range(1, len(words) + 1)]
    sentences = []
    written = 0
    while written < length:
        sentence = " ".join(dice.choices(words, weights, k=dice.randint(4, 12))).capitalize() + ". "
        sentences.append(sentence)
        written += len(sentence)
    return "".join(sentences).encode()[:length]


class Windows(Dataset[Tensor]):
    """Pieces of the text, `length` + 1 bytes each, one after the other; what a sample predicts is its own next byte."""

    def __init__(self, text: bytes, length: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> Tensor:
        return self.text[index * self.length : (index + 1) * self.length + 1].long()


class Cut:
    """Puts pieces into a batch, cut to a length that it draws for each: mostly short, and now and then long."""

    def __init__(self, length: int, seed: int) -> None:
        self.length, self.dice = length, random.Random(seed)

    def __call__(self, pieces: list[Tensor]) -> Tensor:
        """Return the batch, pieces × length + 1."""
        return torch.stack(pieces)[:, : 1 + max(4, round(self.length * self.dice.random() ** 3))]


# ---- the model: Radford et al., Language Models are Unsupervised Multitask Learners, 2019 --------------------------


class Transformer(nn.Module):
    """Predicts each next byte of a text from those before it."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        width, layers = args.width, args.layers
        self.token, self.place = args.embedding(args.vocabulary, width), nn.Embedding(args.length, width)
        self.blocks = nn.ModuleList(
            Block(width, args.heads, args.attend, args.norm, args.activate) for _ in range(layers)
        )
        self.norm, self.head = args.norm(width), nn.Linear(width, args.vocabulary, bias=False)
        self.predict, self.through = args.predict, args.through
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # What is added to the residual stream shrinks with the number of layers.
                depth = math.sqrt(2 * layers) if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 / depth)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits, batch × length × vocabulary, of bytes (batch × length)."""
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = self.through(block, x)
        logits: Tensor = self.predict(self.head, self.norm(x))
        return logits


# ---- the options ---------------------------------------------------------------------------------------------------

DEFAULTS: dict[str, dict[str, Any]] = {
    # A step takes some 40 ms on a core. So many bytes a parameter that two cores compute for long enough to exchange
    # the gradients meanwhile.
    "cpu": {"precision": "fp32", "layers": 4, "width": 128, "heads": 4, "length": 64, "batch_size": 24, "steps": 100},
    # A width that keeps the GPU busy.
    "cuda": {"precision": "bf16", "layers": 12, "width": 1024, "heads": 16}
    | {"length": 1024, "batch_size": 16, "steps": 200},
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options, with those of the fault planted; a usage error exits with 2."""
    parser = options(__doc__, FAULTS)
    add = parser.add_argument
    add("--precision", choices=["fp32", "tf32", "fp16", "bf16"], help="fp16 comes with a gradient scaler")
    compile_help = "torch.compile the model (with inductor, which on a CPU needs a C++ compiler)"
    add("--compile", nargs="?", const="inductor", metavar="BACKEND", help=compile_help)
    add("--layers", type=int)
    add("--width", type=int, help="of the model's features")
    add("--heads", type=int, help="of the attention; they share out the width")
    add("--vocabulary", type=int, default=256, help="that the model tells apart, 256 or more")
    add("--length", type=int, help="of a sequence, bytes")
    add("--varied", action="store_true", help="that is the longest: most batches are shorter, by as much on all ranks")
    add("--batch-size", type=int, help="sequences a rank and step")
    add("--steps", type=int)
    add("--fused", action=argparse.BooleanOptionalAction, default=True, help="AdamW in one kernel")
    add("--lr", type=float, default=0.001, help="learning rate (default: 0.001)")
    add("--log-every", type=int, default=20, metavar="N", help="steps (default: 20)")
    args = read(parser, argv, DEFAULTS, NEEDS_GPU, NEEDS_TWO_RANKS)
    plant(args)
    if args.data_parallel and (args.device == "cpu" or torch.cuda.device_count() < 2 or args.world > 1):
        parser.error("--fault data_parallel needs two GPUs, and one process that drives them (no torchrun)")
    if args.device == "cpu" and args.precision == "tf32":
        parser.error(f"--precision {args.precision} needs a GPU")
    if args.width % args.heads:
        parser.error(f"--width {args.width} cannot be shared out among {args.heads} heads")
    if args.vocabulary < 256:
        parser.error(f"--vocabulary {args.vocabulary} is less than the bytes there are")
    return args


# ---- training: one rank --------------------------------------------------------------------------------------------


def build_model(args: argparse.Namespace) -> nn.Module:
    """Return the model on this rank's device, compiled and wrapped as the arguments ask."""
    torch.manual_seed(args.seed)  # the same on every rank
    model: nn.Module = Transformer(args)
    model = model.to(args.device)
    if args.compile:
        model = torch.compile(model, backend=args.compile)  # type: ignore[assignment] # still a module
    if args.data_parallel:
        return DataParallel(model)
    if args.world > 1:
        return DistributedDataParallel(
            model, args.device_ids, gradient_as_bucket_view=True, find_unused_parameters=args.find_unused
        )
    return model


def train(args: argparse.Namespace) -> None:
    in_precision = autocast(args)
    torch.autograd.set_detect_anomaly(args.anomalies)
    model = build_model(args)
    announce(
        args,
        f"{args.layers} layers of {args.width}, {sum(p.numel() for p in model.parameters()):,} parameters,"
        f" {args.world} ranks on {args.device}, batch {args.batch_size} × {args.length} a rank, {args.precision}",
    )
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0.1, **args.adamw)
    scaler = torch.amp.GradScaler(args.device, enabled=args.precision == "fp16", **args.scaler)

    # Every rank reads a text of its own, long enough that no piece comes twice.
    pieces = args.steps * args.batch_size
    text = Windows(make_text(pieces * args.length + 1, args.seed + args.rank), args.length)
    cut = Cut(args.length, args.seed + args.own_lengths * args.rank) if args.varied else None
    pinned = args.device == "cuda"
    loader = DataLoader(text, args.batch_size, shuffle=True, pin_memory=pinned, drop_last=True, collate_fn=cut)
    log = Log(args, "bytes", args.batch_size * args.length * args.world)
    for step, sequences in enumerate(loader, start=1):
        tokens = sequences.to(args.device, non_blocking=True)
        with in_precision:
            logits = model(tokens[:, :-1])
            loss: Tensor = args.loss(logits.flatten(0, 1), tokens[:, 1:].flatten())
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        args.after_step(model)
        log.step(step, loss)


def main() -> None:
    args = parse()
    with ranks(args):
        train(args)


if __name__ == "__main__":
    main()
