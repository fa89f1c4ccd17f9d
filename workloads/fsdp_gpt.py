"""Train a byte-level language model whose parameters or optimizer are sharded, well, or with one of FAULTS planted.

    torchrun --nproc-per-node 2 workloads/fsdp_gpt.py                            FSDP2: each block gathered when needed
    torchrun --nproc-per-node 2 workloads/fsdp_gpt.py --no-reshard               kept from the forward to the backward
    torchrun --nproc-per-node 2 workloads/fsdp_gpt.py --prefetch 2               gathered two blocks ahead
    torchrun --nproc-per-node 2 workloads/fsdp_gpt.py --checkpointing            the backward computes the forward anew
    torchrun --nproc-per-node 2 workloads/fsdp_gpt.py --sharding zero1           DDP, and the optimizer's state sharded
    torchrun --nproc-per-node 2 workloads/fsdp_gpt.py --fault each_layer

Each sequence counts through the vocabulary by a step of its own, so the loss falls once the model has seen which. Plain
PyTorch: any profiler can be pointed at it, and none is imported.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

# What can be planted, and the dlprof rule that must notice it. Each is one `if args.fault == ...` below.
FAULTS = {
    "each_layer": "small_collectives",  # every linear layer and every norm is gathered and reduced on its own
    "long_sequences": "straggler",  # the last rank's sequences are twice as long
    "loop_optimizer": "unfused_optimizer",  # AdamW takes one parameter after the other
    "no_p2p": "slow_link",  # NCCL is kept off NVLink, as by a setting that was left in the environment
    "norm_every_step": "host_sync",  # the gradients' norm is read in every step, and the GPU runs dry
    "tiny_batch": "exposed_communication",  # one short sequence: too little to compute while parameters are gathered
    "whole_model": "exposed_communication",  # one unit: all is gathered before the forward, all reduced at the end
}
# Options under which it is healthy as well.
HEALTHY = {
    "checkpointing": "--checkpointing",
    "no_reshard": "--no-reshard",
    "prefetch": "--prefetch 2",
    "zero1": "--sharding zero1",
}
# A step with it does less than any healthy one: none says how long it would take without.
OTHER_STEP = ("tiny_batch",)
# What else a fault needs, to cost more than a little.
SHOWN_WITH = {"loop_optimizer": "--batch-size 32"}
NEEDS_GPU = ("no_p2p", "norm_every_step", "whole_model")
NEEDS_FSDP = ("each_layer", "whole_model")


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
        self.checkpointing = args.checkpointing
        self.token = nn.Embedding(args.vocabulary, args.width)
        self.place = nn.Embedding(args.longest, args.width)
        self.blocks = nn.ModuleList(Block(args.width, args.heads) for _ in range(args.layers))
        self.norm, self.head = nn.LayerNorm(args.width), nn.Linear(args.width, args.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits, one row a token, of tokens (batch × length)."""
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
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
    "cpu": {"precision": "fp32", "layers": 4, "width": 64, "heads": 4, "length": 64, "batch_size": 192, "steps": 60},
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
    parser.add_argument(
        "--sharding",
        choices=["fsdp", "zero1", "ddp"],
        default="fsdp",
        help="of parameters, gradients and optimizer (FSDP2, the default), of the optimizer alone, or of nothing",
    )
    parser.add_argument(
        "--reshard",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="drop a block's parameters after its forward and gather them again for its backward (default)",
    )
    parser.add_argument("--prefetch", type=int, default=0, metavar="N", help="blocks to gather ahead (default: FSDP's)")
    parser.add_argument("--checkpointing", action="store_true", help="keep no features within a block")
    parser.add_argument("--precision", choices=["fp32", "bf16"], help="of the products; parameters stay in fp32")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int, help="of the model's features")
    parser.add_argument("--heads", type=int, help="of the attention; they share out the width")
    parser.add_argument("--vocabulary", type=int, default=256, help="tokens (default: 256)")
    parser.add_argument("--length", type=int, help="of a sequence, tokens")
    parser.add_argument("--batch-size", type=int, help="sequences a rank and step")
    parser.add_argument("--steps", type=int)
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
    if args.fault and args.world < 2 and FAULTS[args.fault] not in ("host_sync", "unfused_optimizer"):
        parser.error(f"--fault {args.fault} needs two ranks: torchrun --nproc-per-node 2 {parser.prog} ...")
    if args.fault in NEEDS_GPU and args.device != "cuda":
        parser.error(f"--fault {args.fault} needs a GPU: on a CPU nothing overlaps, and there is no NVLink")
    if args.fault in NEEDS_FSDP and args.sharding != "fsdp":
        parser.error(f"--fault {args.fault} needs --sharding fsdp")
    if args.width % args.heads:
        parser.error(f"--width {args.width} cannot be shared out among {args.heads} heads")
    args.longest = 2 * args.length  # so that the parameters are the same with and without a fault
    if args.fault == "tiny_batch":
        args.batch_size, args.length = 1, min(args.length, 64)
    if args.fault == "long_sequences" and args.rank == args.world - 1:
        args.length = args.longest
    return args


def shard(model: Transformer, args: argparse.Namespace) -> nn.Module:
    """Return the model sharded in place, block by block; or a copy on each rank, whose gradients are averaged."""
    if args.sharding != "fsdp":
        devices = [args.local_rank] if args.device == "cuda" else None
        return DistributedDataParallel(model, devices) if args.world > 1 else model

    mesh = init_device_mesh(args.device, (args.world,))
    how: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": args.reshard}
    if args.precision == "bf16":
        how["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    units: list[nn.Module] = list(model.blocks)
    if args.fault == "whole_model":
        units = []
    if args.fault == "each_layer":
        units = [m for m in model.modules() if isinstance(m, nn.Linear | nn.LayerNorm)]
    for unit in units:
        fully_shard(unit, **how)
    fully_shard(model, **how)
    sharded: list[FSDPModule] = [unit for unit in units if isinstance(unit, FSDPModule)]
    if args.prefetch:
        for n, one in enumerate(sharded):
            one.set_modules_to_forward_prefetch(sharded[n + 1 : n + 1 + args.prefetch])
            one.set_modules_to_backward_prefetch(sharded[max(0, n - args.prefetch) : n][::-1])
    return model


def build_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """Return AdamW over this rank's shards of the parameters, or (zero1) over its share of whole parameters."""
    how: dict[str, Any] = {"lr": args.lr, "weight_decay": 0.1, "fused": True}
    if args.fault == "loop_optimizer":
        how.update(fused=False, foreach=False)
    if args.sharding == "zero1" and args.world > 1:
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **how)
    return torch.optim.AdamW(model.parameters(), **how)


def main() -> None:
    args = parse()
    if args.fault == "no_p2p":
        os.environ["NCCL_P2P_DISABLE"] = "1"
    if args.device == "cuda":
        torch.cuda.set_device(args.local_rank)
    if args.world == 1:
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", "0")
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", rank=args.rank, world_size=args.world)
    torch.manual_seed(args.seed)  # the same on every rank
    whole = Transformer(args).to(args.device)
    if args.rank == 0:
        count = sum(p.numel() for p in whole.parameters())
        print(
            f"{args.layers} layers of {args.width}, {count:,} parameters, {args.sharding} on {args.world} ranks on"
            f" {args.device}, batch {args.batch_size} × {args.length} a rank, {args.precision},"
            f" fault: {args.fault or 'none'}",
            flush=True,
        )
    model = shard(whole, args)
    optimizer = build_optimizer(model, args)

    # FSDP casts by itself; with DDP it is autocast's work.
    casts = args.precision == "bf16" and args.sharding != "fsdp"
    loader = DataLoader(
        Counting(args.vocabulary, args.length, args.seed + args.rank),
        args.batch_size,
        pin_memory=args.device == "cuda",
    )
    logged_at = time.perf_counter()
    for step, sequences in enumerate(loader, start=1):
        tokens = sequences.to(args.device, non_blocking=True)
        with torch.autocast(args.device, torch.bfloat16, enabled=casts):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.float(), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        if args.fault == "norm_every_step":
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if not norm.isfinite():  # waits for the device
                raise ValueError(f"step {step}: the gradients are not finite")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        if step % args.log_every == 0 and args.rank == 0:
            value = loss.item()  # waits for the device, so not at every step
            now = time.perf_counter()
            rate = args.log_every * args.batch_size * args.length * args.world / (now - logged_at)
            print(f"step {step}  loss {value:.4f}  {rate:,.0f} tokens/s", flush=True)
            logged_at = now
        if step == args.steps:
            break

    # Before its group: the other way round, PyTorch 2.13 and gloo's threads may wait for each other for ever.
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
