"""Train a language model with DeepSpeed's ZeRO, stages 1 to 3, well, or with one of the mistakes in FAULTS.

    torchrun --nproc-per-node 2 workloads/deepspeed_gpt.py                       stage 2: optimizer and gradients
    torchrun --nproc-per-node 2 workloads/deepspeed_gpt.py --stage 3             parameters as well
    torchrun --nproc-per-node 2 workloads/deepspeed_gpt.py --offload             the optimizer in the host's memory
    deepspeed --num_gpus 2 workloads/deepspeed_gpt.py                            its own launcher
    torchrun --nproc-per-node 2 workloads/deepspeed_gpt.py --fault long_sequences

Needs DeepSpeed, which builds against the torch that is there: pip install --no-build-isolation 'deepspeed>=0.16', with
DS_BUILD_OPS=0 in the environment where there is no GPU. Each sequence counts through the vocabulary by a step of its
own, so the loss falls once the model has seen which.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from parts.job import Log, announce, options, process_group, read
from parts.language import Counting, Transformer
from torch.utils.data import DataLoader

# What can be planted, and the dlprof rule that must notice it. plant() has a line for each.
NEEDS = {"deepspeed": "pip install --no-build-isolation 'deepspeed>=0.16'"}
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
NEEDS_GPU = ("offload", "tiny_buckets")  # a CPU rank copies nothing, and gloo's trace tells no sizes
NEEDS_TWO_RANKS = ("long_sequences", "tiny_batch", "tiny_buckets")


def plant(args: argparse.Namespace) -> None:
    """Change the settings of a healthy run into those of a run with args.fault. No other code asks for the fault."""
    healthy: dict[str, Any] = {"buckets": {}}
    faulty: dict[str, dict[str, Any]] = {
        "long_sequences": {"length": args.longest} if args.rank == args.world - 1 else {},
        "offload": {"offload": True},
        "tiny_batch": {"batch_size": 1, "length": min(args.length, 64)},
        "tiny_buckets": {"buckets": {"reduce_bucket_size": 1, "allgather_bucket_size": 1}},
    }
    vars(args).update(healthy | faulty.get(args.fault, {}))


# On two CPU cores a step then takes some 400 ms; a GPU's width keeps it busy. A batch is twice as large in stage 3, for
# the parameters that are gathered in each pass.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"precision": "fp32", "layers": 4, "width": 64, "heads": 4, "length": 64, "steps": 60},
    "cuda": {"precision": "bf16", "layers": 24, "width": 2048, "heads": 16, "length": 2048, "steps": 100},
}
BATCH = {"cpu": 128, "cuda": 8}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options, with those of the fault planted; a usage error exits with 2."""
    parser = options(__doc__, FAULTS)
    add = parser.add_argument
    add("--stage", type=int, choices=[1, 2, 3], default=2, help="of ZeRO (default: 2)")
    add("--offload", action="store_true", help="keep the optimizer in the host's memory")
    add("--precision", choices=["fp32", "bf16"])
    add("--layers", type=int)
    add("--width", type=int, help="of the model's features")
    add("--heads", type=int, help="of the attention; they share out the width")
    add("--vocabulary", type=int, default=256, help="tokens (default: 256)")
    add("--length", type=int, help="of a sequence, tokens")
    add("--batch-size", type=int, help="sequences a rank and step; twice as many in stage 3")
    add("--steps", type=int)
    add("--lr", type=float, default=0.001, help="learning rate (default: 0.001)")
    add("--log-every", type=int, default=20, metavar="N", help="steps (default: 20)")
    add("--local_rank", type=int, help="for DeepSpeed's launcher, which gives it")
    args = read(parser, argv, DEFAULTS, NEEDS_GPU, NEEDS_TWO_RANKS)
    if args.width % args.heads:
        parser.error(f"--width {args.width} cannot be shared out among {args.heads} heads")
    if args.batch_size is None:
        args.batch_size = BATCH[args.device] * (2 if args.stage == 3 else 1)
    args.longest = 2 * args.length  # so that the parameters are the same with and without a fault
    plant(args)
    return args


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return DeepSpeed's configuration."""
    zero = {"stage": args.stage} | args.buckets
    if args.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": args.device == "cuda"}
    return {
        "train_micro_batch_size_per_gpu": args.batch_size,
        # torch's own AdamW: DeepSpeed's is compiled on first use.
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "weight_decay": 0.1, "torch_adam": True}},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": args.precision == "bf16"},
    }


def train(args: argparse.Namespace, initialize: Callable[..., Any]) -> None:
    """Train with DeepSpeed's engine, which `initialize` makes."""
    torch.manual_seed(args.seed)  # the same on every rank
    model = Transformer(args.vocabulary, args.longest, args.width, args.heads, args.layers)
    announce(
        args,
        f"{args.layers} layers of {args.width}, {sum(p.numel() for p in model.parameters()):,} parameters, ZeRO"
        f" {args.stage} on {args.world} ranks on {args.device}, batch {args.batch_size} × {args.length} a rank,"
        f" {args.precision}",
    )
    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=settings(args))

    loader = DataLoader(
        Counting(args.vocabulary, args.length, args.seed + args.rank),
        args.batch_size,
        pin_memory=args.device == "cuda",
    )
    log = Log(args, "tokens", args.batch_size * args.length * args.world)
    for step, sequences in enumerate(loader, start=1):
        tokens = sequences.to(engine.device, non_blocking=True)
        logits = engine(tokens[:, :-1])
        loss = F.cross_entropy(logits.float(), tokens[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        log.step(step, loss)
        if step == args.steps:
            break


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
    with process_group(args):
        train(args, deepspeed.initialize)


if __name__ == "__main__":
    main()
