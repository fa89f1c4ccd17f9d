"""Train a byte-level language model in the precision of one's choice, well, or with one of the mistakes in FAULTS.

    python workloads/amp_transformer.py                                  one process
    torchrun --nproc-per-node 2 workloads/amp_transformer.py             one process a GPU, or a CPU rank each
    python workloads/amp_transformer.py --fault loop_optimizer

The text is made up: sentences of invented words, some far more common than others, so that the loss falls as the model
learns to spell. Plain PyTorch: any profiler can be pointed at it, and none is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

# What can be planted, and the dlprof rule that must notice it. Each is one `if args.fault == ...` below.
FAULTS = {
    "data_parallel": "data_parallel",  # one process drives all GPUs, and copies the model to each in every step
    "find_unused": "unused_parameters",  # DDP looks for parameters without a gradient in every step: there are none
    "full_precision": "fp32_matmul",  # neither autocast nor TF32
    "loop_optimizer": "unfused_optimizer",  # AdamW takes one parameter after the other
    "odd_shapes": "misaligned_shapes",  # widths and lengths that are no multiple of 8
    "scores_in_memory": "unfused_attention",  # attention by two products and a softmax
    "tiny_batch": "small_kernels",  # so little work in each kernel that launching it takes longer
}
# What else a fault needs, to cost more than a little.
SHOWN_WITH = {
    "find_unused": "--layers 12 --width 64 --length 16 --batch-size 2",
    "loop_optimizer": "--width 256 --length 32 --batch-size 4",
}
# A step with it does less than any healthy one: none says how long it would take without.
OTHER_STEP = ("tiny_batch",)
NEEDS_GPU = ("find_unused", "full_precision", "odd_shapes", "scores_in_memory", "tiny_batch")

PRECISIONS = ("fp32", "tf32", "fp16", "bf16")


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


# ---- the model: Radford et al., Language Models are Unsupervised Multitask Learners, 2019 --------------------------


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each after a norm and beside a way around."""

    def __init__(self, width: int, heads: int, fused: bool = True) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return features, batch × length × width, of features of the same shape."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if self.fused:
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores = (q @ k.transpose(-2, -1)) / math.sqrt(width // self.heads)
            seen = scores.masked_fill(later, -math.inf).softmax(-1).to(v.dtype) @ v
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        down: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + down


class Transformer(nn.Module):
    """Predicts each next byte of a text from those before it."""

    def __init__(
        self, vocabulary: int, length: int, width: int, heads: int, layers: int, fused_attention: bool = True
    ) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, fused_attention) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # What is added to the way around shrinks with the number of layers.
                depth = math.sqrt(2 * layers) if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 / depth)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits, batch × length × vocabulary, of bytes (batch × length)."""
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


# ---- one rank ------------------------------------------------------------------------------------------------------

# On a CPU core a step then takes some 40 ms; a GPU's width keeps it busy.
DEFAULTS: dict[str, dict[str, Any]] = {
    # So many bytes a parameter that two CPU cores compute for long enough to exchange the gradients meanwhile.
    "cpu": {"precision": "fp32", "layers": 4, "width": 128, "heads": 4, "length": 64, "batch_size": 24, "steps": 100},
    "cuda": {
        "precision": "bf16",
        "layers": 12,
        "width": 1024,
        "heads": 16,
        "length": 1024,
        "batch_size": 16,
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
    parser.add_argument("--precision", choices=PRECISIONS, help="fp16 comes with a gradient scaler")
    parser.add_argument(
        "--compile",
        nargs="?",
        const="inductor",
        metavar="BACKEND",
        help="torch.compile the model (with inductor, which on a CPU needs a C++ compiler)",
    )
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int, help="of the model's features")
    parser.add_argument("--heads", type=int, help="of the attention; they share out the width")
    parser.add_argument("--vocabulary", type=int, default=256, help="that the model tells apart, 256 or more")
    parser.add_argument("--length", type=int, help="of a sequence, bytes")
    parser.add_argument("--batch-size", type=int, help="sequences a rank and step")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--fused", action=argparse.BooleanOptionalAction, default=True, help="AdamW in one kernel")
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate (default: 0.001)")
    parser.add_argument("--log-every", type=int, default=20, metavar="N", help="steps (default: 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fault", choices=list(FAULTS), help="plant this mistake")
    args = parser.parse_args(argv)

    # torchrun says who we are; without it we are the only rank.
    args.rank, args.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    args.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.fault == "full_precision":
        args.precision = "fp32"
    if args.fault == "odd_shapes":
        args.vocabulary, args.heads, args.length = 257, args.heads - 1, args.length - 1
        args.width = args.heads * ((args.width // args.heads - 1) | 1)
    if args.fault == "tiny_batch":
        args.batch_size, args.length = 1, 64
    if args.fault in NEEDS_GPU and args.device != "cuda":
        why = "a CPU has neither tensor cores nor launches"
        if args.fault == "find_unused":
            why = "beside a CPU's computing the search is nothing"
        if args.fault == "scores_in_memory":
            why = "what fused attention gains on a CPU is not predicted"
        parser.error(f"--fault {args.fault} needs a GPU: {why}")
    if args.fault == "data_parallel" and (args.device != "cuda" or torch.cuda.device_count() < 2 or args.world > 1):
        parser.error("--fault data_parallel needs two GPUs, and one process that drives them (no torchrun)")
    if args.fault == "find_unused" and args.world < 2:
        parser.error(f"--fault find_unused needs two ranks: torchrun --nproc-per-node 2 {parser.prog} ...")
    if args.device == "cpu" and args.precision in ("tf32", "fp16"):
        parser.error(f"--precision {args.precision} needs a GPU")
    if args.width % args.heads:
        parser.error(f"--width {args.width} cannot be shared out among {args.heads} heads")
    if args.vocabulary < 256:
        parser.error(f"--vocabulary {args.vocabulary} is less than the bytes there are")
    return args


def autocast(args: argparse.Namespace) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which the forward pass runs in 16 bits, or one that does nothing."""
    if args.precision in ("fp32", "tf32"):
        return contextlib.nullcontext()
    return torch.autocast(args.device, torch.bfloat16 if args.precision == "bf16" else torch.float16)


def build_model(args: argparse.Namespace) -> nn.Module:
    """Return the model on this rank's device, compiled and wrapped as the arguments ask."""
    torch.manual_seed(args.seed)  # the same on every rank
    fused = args.fault != "scores_in_memory"
    model: nn.Module = Transformer(args.vocabulary, args.length, args.width, args.heads, args.layers, fused)
    model = model.to(args.device)
    if args.compile:
        model = torch.compile(model, backend=args.compile)  # type: ignore[assignment] # still a module
    if args.fault == "data_parallel":
        return DataParallel(model)
    if args.world > 1:
        return DistributedDataParallel(
            model,
            device_ids=[args.local_rank] if args.device == "cuda" else None,
            gradient_as_bucket_view=True,
            find_unused_parameters=args.fault == "find_unused",
        )
    return model


def main() -> None:
    args = parse()
    if args.device == "cuda":
        torch.cuda.set_device(args.local_rank)
        torch.backends.cuda.matmul.allow_tf32 = args.precision == "tf32"
        torch.backends.cudnn.allow_tf32 = args.precision == "tf32"  # on by default, and then fp32 is not fp32
    if args.world > 1:
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    model = build_model(args)
    if args.rank == 0:
        count = sum(p.numel() for p in model.parameters())
        print(
            f"{args.layers} layers of {args.width}, {count:,} parameters, {args.world} ranks on {args.device}, batch"
            f" {args.batch_size} × {args.length} a rank, {args.precision}, fault: {args.fault or 'none'}",
            flush=True,
        )
    how: dict[str, Any] = {"fused": args.fused} if args.fault != "loop_optimizer" else {"foreach": False}
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0.1, **how)
    scaler = torch.amp.GradScaler(args.device, enabled=args.precision == "fp16")

    # Every rank reads a text of its own, long enough that no piece comes twice.
    pieces = args.steps * args.batch_size
    text = Windows(make_text(pieces * args.length + 1, args.seed + args.rank), args.length)
    loader = DataLoader(text, args.batch_size, shuffle=True, pin_memory=args.device == "cuda", drop_last=True)
    logged_at = time.perf_counter()
    for step, sequences in enumerate(loader, start=1):
        tokens = sequences.to(args.device, non_blocking=True)
        with autocast(args):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

        if step % args.log_every == 0 and args.rank == 0:
            value = loss.item()  # waits for the device, so not at every step
            now = time.perf_counter()
            rate = args.log_every * args.batch_size * args.length * args.world / (now - logged_at)
            print(f"step {step}  loss {value:.4f}  {rate:,.0f} bytes/s", flush=True)
            logged_at = now

    # Before its group: the other way round, PyTorch 2.13 and gloo's threads may wait for each other for ever.
    del model
    if args.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
