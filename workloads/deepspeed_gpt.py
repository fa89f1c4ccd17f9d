"""Train a language model with DeepSpeed's ZeRO, stages 1 to 3, well, or with one of the mistakes in FAULTS.

    torchrun --nproc-per-node 2 workloads/deepspeed_gpt.py                       stage 2: optimizer and gradients
    torchrun --nproc-per-node 2 workloads/deepspeed_gpt.py --stage 3             parameters as well
    torchrun --nproc-per-node 2 workloads/deepspeed_gpt.py --offload             the optimizer in the host's memory
    deepspeed --num_gpus 2 workloads/deepspeed_gpt.py                            its own launcher
    torchrun --nproc-per-node 2 workloads/deepspeed_gpt.py --fault long_sequences

Needs DeepSpeed, which builds against the torch that is there: pip install --no-build-isolation 'deepspeed>=0.16', with
DS_BUILD_OPS=0 in the environment where there is no GPU. Each sequence counts through the vocabulary by a step of its
own, so the loss falls once the model has seen which. DeepSpeed and PyTorch alone: any profiler can be pointed at it,
and none is imported.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

# What can be planted, and the dlprof rule that must notice it. Each is one `if args.fault == ...` below.
FAULTS = {
    "long_sequences": "straggler",  # the last rank's sequences are twice as long
    "offload": "exposed_copy",  # the optimizer in the host's memory, though the GPU has room: gradients cross PCIe
    "tiny_batch": "exposed_communication",  # one short sequence: too little to compute for what is exchanged
    "tiny_buckets": "small_collectives",  # every gradient is a bucket and an exchange of its own
}
# Options under which it is healthy as well.
HEALTHY = {"stage1": "--stage 1", "stage3": "--stage 3"}
# A step with it does less than any healthy one: none says how long it would take without.
OTHER_STEP = ("tiny_batch",)
NEEDS_GPU = ("offload", "tiny_buckets")
NEEDS_TWO_RANKS = ("long_sequences", "tiny_batch", "tiny_buckets")


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


class Transformer(nn.Module):
    """Predicts each next token of a sequence from those before it."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.token = nn.Embedding(args.vocabulary, args.width)
        self.place = nn.Embedding(args.longest, args.width)
        self.blocks = nn.ModuleList(Block(args.width, args.heads) for _ in range(args.layers))
        self.norm, self.head = nn.LayerNorm(args.width), nn.Linear(args.width, args.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits, one row a token, of tokens (batch × length)."""
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x).flatten(0, 1))
        return logits


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

# On two CPU cores a step then takes some 400 ms; a GPU's width keeps it busy.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"precision": "fp32", "layers": 4, "width": 64, "heads": 4, "length": 64, "batch_size": 128, "steps": 60},
    "cuda": {
        "precision": "bf16",
        "layers": 24,
        "width": 2048,
        "heads": 16,
        "length": 2048,
        "batch_size": 8,
        "steps": 100,
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
    parser.add_argument("--stage", type=int, choices=[1, 2, 3], default=2, help="of ZeRO (default: 2)")
    parser.add_argument("--offload", action="store_true", help="keep the optimizer in the host's memory")
    parser.add_argument("--precision", choices=["fp32", "bf16"])
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int, help="of the model's features")
    parser.add_argument("--heads", type=int, help="of the attention; they share out the width")
    parser.add_argument("--vocabulary", type=int, default=256, help="tokens (default: 256)")
    parser.add_argument("--length", type=int, help="of a sequence, tokens")
    parser.add_argument("--batch-size", type=int, help="sequences a rank and step; twice as many in stage 3")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate (default: 0.001)")
    parser.add_argument("--log-every", type=int, default=20, metavar="N", help="steps (default: 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--local_rank", type=int, help="for DeepSpeed's launcher, which gives it")
    parser.add_argument("--fault", choices=list(FAULTS), help="plant this mistake")
    args = parser.parse_args(argv)

    # The launcher says who we are; without one we are the only rank.
    args.rank, args.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    args.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
            if name == "batch_size" and args.stage == 3:
                args.batch_size *= 2  # for the parameters that are gathered in each pass
    if args.fault in NEEDS_GPU and args.device != "cuda":
        parser.error(f"--fault {args.fault} needs a GPU: a CPU rank copies nothing, and gloo's trace tells no sizes")
    if args.fault in NEEDS_TWO_RANKS and args.world < 2:
        parser.error(f"--fault {args.fault} needs two ranks: torchrun --nproc-per-node 2 {parser.prog} ...")
    if args.width % args.heads:
        parser.error(f"--width {args.width} cannot be shared out among {args.heads} heads")
    args.longest = 2 * args.length  # so that the parameters are the same with and without a fault
    if args.fault == "tiny_batch":
        args.batch_size, args.length = 1, min(args.length, 64)
    if args.fault == "long_sequences" and args.rank == args.world - 1:
        args.length = args.longest
    return args


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return DeepSpeed's configuration."""
    zero: dict[str, Any] = {"stage": args.stage}
    if args.offload or args.fault == "offload":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": args.device == "cuda"}
    if args.fault == "tiny_buckets":
        zero |= {"reduce_bucket_size": 1, "allgather_bucket_size": 1}
    return {
        "train_micro_batch_size_per_gpu": args.batch_size,
        # torch's own AdamW: DeepSpeed's is compiled on first use.
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "weight_decay": 0.1, "torch_adam": True}},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": args.precision == "bf16"},
    }


def main() -> None:
    args = parse()
    if args.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # it looks on import
    try:
        import deepspeed
    except ImportError:
        sys.exit("deepspeed_gpt.py needs DeepSpeed: pip install --no-build-isolation 'deepspeed>=0.16'")

    if args.world == 1:
        alone = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        os.environ.update(alone)
    if args.device == "cuda":
        torch.cuda.set_device(args.local_rank)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    torch.manual_seed(args.seed)  # the same on every rank
    model = Transformer(args)
    if args.rank == 0:
        count = sum(p.numel() for p in model.parameters())
        print(
            f"{args.layers} layers of {args.width}, {count:,} parameters, ZeRO {args.stage} on {args.world} ranks on"
            f" {args.device}, batch {args.batch_size} × {args.length} a rank, {args.precision},"
            f" fault: {args.fault or 'none'}",
            flush=True,
        )
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings(args))

    loader = DataLoader(
        Counting(args.vocabulary, args.length, args.seed + args.rank),
        args.batch_size,
        pin_memory=args.device == "cuda",
    )
    logged_at = time.perf_counter()
    for step, sequences in enumerate(loader, start=1):
        tokens = sequences.to(engine.device, non_blocking=True)
        logits = engine(tokens[:, :-1])
        loss = F.cross_entropy(logits.float(), tokens[:, 1:].flatten())
        engine.backward(loss)
        engine.step()

        if step % args.log_every == 0 and args.rank == 0:
            value = loss.item()  # waits for the device, so not at every step
            now = time.perf_counter()
            rate = args.log_every * args.batch_size * args.length * args.world / (now - logged_at)
            print(f"step {step}  loss {value:.4f}  {rate:,.0f} tokens/s", flush=True)
            logged_at = now
        if step == args.steps:
            break

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
