"""Train a byte-level language model whose parameters or optimizer are sharded, well, or with one of FAULTS planted.

    torchrun --nproc-per-node 2 workloads/fsdp_gpt.py                            FSDP2: each block gathered when needed
    torchrun --nproc-per-node 2 workloads/fsdp_gpt.py --no-reshard               kept from the forward to the backward
    torchrun --nproc-per-node 2 workloads/fsdp_gpt.py --prefetch 2               gathered two blocks ahead
    torchrun --nproc-per-node 2 workloads/fsdp_gpt.py --checkpointing            the backward computes the forward anew
    torchrun --nproc-per-node 2 workloads/fsdp_gpt.py --sharding zero1           DDP, and the optimizer's state sharded
    torchrun --nproc-per-node 2 workloads/fsdp_gpt.py --fault each_layer

Each sequence counts through the vocabulary by a step of its own, so the loss falls once the model has seen which.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from parts.job import Log, announce, options, process_group, read
from parts.language import Counting, Transformer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

# ---- the faults ----------------------------------------------------------------------------------------------------

# What can be planted, and the dlprof rule that must notice it. plant() has a line for each.
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
NEEDS_GPU = ("no_p2p", "norm_every_step", "whole_model")  # on a CPU nothing overlaps, and there is no NVLink
NEEDS_TWO_RANKS = ("each_layer", "long_sequences", "no_p2p", "tiny_batch", "whole_model")
NEEDS_FSDP = ("each_layer", "whole_model")


def plant(args: argparse.Namespace) -> None:
    """Change the settings of a healthy run into those of a run with args.fault. No other code asks for the fault."""
    healthy: dict[str, Any] = {"adamw": {"fused": True}, "environment": {}, "units": lambda model: list(model.blocks)}
    healthy["after_backward"] = lambda _model, _step: None
    faulty: dict[str, dict[str, Any]] = {
        "each_layer": {"units": layers_of},
        "long_sequences": {"length": args.longest} if args.rank == args.world - 1 else {},
        "loop_optimizer": {"adamw": {"fused": False, "foreach": False}},
        "no_p2p": {"environment": {"NCCL_P2P_DISABLE": "1"}},
        "norm_every_step": {"after_backward": check_norm},
        "tiny_batch": {"batch_size": 1, "length": min(args.length, 64)},
        "whole_model": {"units": lambda _model: []},
    }
    vars(args).update(healthy | faulty.get(args.fault, {}))


def layers_of(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, nn.Linear | nn.LayerNorm)]


def check_norm(model: nn.Module, step: int) -> None:
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not norm.isfinite():  # waits for the device
        raise ValueError(f"step {step}: the gradients are not finite")


# ---- the options ---------------------------------------------------------------------------------------------------

# On two CPU cores a step then takes some 400 ms; a GPU's width keeps it busy.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"precision": "fp32", "layers": 4, "width": 64, "heads": 4, "length": 64, "batch_size": 192, "steps": 60},
    "cuda": {"precision": "bf16", "layers": 24, "width": 2048, "heads": 16}
    | {"length": 2048, "batch_size": 8, "steps": 100},
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options, with those of the fault planted; a usage error exits with 2."""
    parser = options(__doc__, FAULTS)
    add = parser.add_argument
    sharding_help = "of parameters, gradients and optimizer (FSDP2, the default), of the optimizer alone, or of nothing"
    add("--sharding", choices=["fsdp", "zero1", "ddp"], default="fsdp", help=sharding_help)
    reshard_help = "drop a block's parameters after its forward and gather them again for its backward (default)"
    add("--reshard", action=argparse.BooleanOptionalAction, default=True, help=reshard_help)
    add("--prefetch", type=int, default=0, metavar="N", help="blocks to gather ahead (default: FSDP's)")
    add("--checkpointing", action="store_true", help="keep no features within a block")
    add("--precision", choices=["fp32", "bf16"], help="of the products; parameters stay in fp32")
    add("--layers", type=int)
    add("--width", type=int, help="of the model's features")
    add("--heads", type=int, help="of the attention; they share out the width")
    add("--vocabulary", type=int, default=256, help="tokens (default: 256)")
    add("--length", type=int, help="of a sequence, tokens")
    add("--batch-size", type=int, help="sequences a rank and step")
    add("--steps", type=int)
    add("--lr", type=float, default=0.001, help="learning rate (default: 0.001)")
    add("--log-every", type=int, default=20, metavar="N", help="steps (default: 20)")
    args = read(parser, argv, DEFAULTS, NEEDS_GPU, NEEDS_TWO_RANKS)
    if args.fault in NEEDS_FSDP and args.sharding != "fsdp":
        parser.error(f"--fault {args.fault} needs --sharding fsdp")
    if args.width % args.heads:
        parser.error(f"--width {args.width} cannot be shared out among {args.heads} heads")
    args.longest = 2 * args.length  # so that the parameters are the same with and without a fault
    plant(args)
    return args


# ---- training: one rank --------------------------------------------------------------------------------------------


def shard(model: Transformer, args: argparse.Namespace) -> nn.Module:
    """Return the model sharded in place, block by block; or a copy on each rank, whose gradients are averaged."""
    if args.sharding != "fsdp":
        return DistributedDataParallel(model, args.device_ids) if args.world > 1 else model

    how: dict[str, Any] = {"mesh": init_device_mesh(args.device, (args.world,)), "reshard_after_forward": args.reshard}
    if args.precision == "bf16":
        how["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    units: list[nn.Module] = args.units(model)
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
    how: dict[str, Any] = {"lr": args.lr, "weight_decay": 0.1, **args.adamw}
    if args.sharding == "zero1" and args.world > 1:
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **how)
    return torch.optim.AdamW(model.parameters(), **how)


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)  # the same on every rank
    whole = Transformer(args.vocabulary, args.longest, args.width, args.heads, args.layers, args.checkpointing)
    whole.to(args.device)
    announce(
        args,
        f"{args.layers} layers of {args.width}, {sum(p.numel() for p in whole.parameters()):,} parameters,"
        f" {args.sharding} on {args.world} ranks on {args.device}, batch {args.batch_size} × {args.length} a rank,"
        f" {args.precision}",
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
    log = Log(args, "tokens", args.batch_size * args.length * args.world)
    for step, sequences in enumerate(loader, start=1):
        tokens = sequences.to(args.device, non_blocking=True)
        with torch.autocast(args.device, torch.bfloat16, enabled=casts):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.float(), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        args.after_backward(model, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        log.step(step, loss)
        if step == args.steps:
            break


def main() -> None:
    args = parse()
    os.environ.update(args.environment)
    with process_group(args):
        train(args)


if __name__ == "__main__":
    main()
