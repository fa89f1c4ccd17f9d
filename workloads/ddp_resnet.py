"""Train a ResNet, VGG-19 or AlexNet on pictures with DistributedDataParallel, well, or with one of FAULTS planted.

    python workloads/ddp_resnet.py                                     one process
    torchrun --nproc-per-node 2 workloads/ddp_resnet.py                one process a GPU, or a CPU rank each
    torchrun --nproc-per-node 2 workloads/ddp_resnet.py --fault slow_rank

The pictures are made once, into PNG files under --data, and read back the way real ones are: a file a sample, decoded
and augmented by the loader's workers, with Pillow (pip install pillow).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import gc
import itertools
import os
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from parts.gradients import compress
from parts.job import Log, announce, autocast, batches, options, ranks, read
from parts.metrics import bootstrap_accuracy
from parts.networks import RESNETS, STACKS, build_model
from parts.optimizers import Lars
from parts.pictures import CLASSES, Pictures, make_pictures, normalised, smooth
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, get_worker_info

# ---- the faults ----------------------------------------------------------------------------------------------------

# What can be planted, and the dlprof rule that must notice it. plant() has a line for each.
NEEDS = {"PIL": "pip install pillow"}
FAULTS = {
    "blocking_allreduce": "exposed_communication",  # gradients reduced one by one, after backward
    "blocking_copies": "blocking_copy",  # batches from pinned memory, each of which the script waits for
    "changing_shapes": "recompilation",  # compiled for one size of pictures, and the size changes
    "checkpoint_every_few": "checkpoint_stall",  # the whole state saved over and over, every 5 steps
    "contiguous": "memory_format",  # model and pictures are not in channels_last
    "copies_back": "exposed_copy",  # every batch's pictures are fetched from the GPU again, as if to look at them
    "forward_twice": "unused_forward",  # another forward pass of each batch, for an accuracy
    "garbage": "gc_pauses",  # many objects live on, and every step has them all searched, as if to save memory
    "histograms": "periodic_work",  # of all weights, in pure Python, every 10 steps
    "item_every_step": "host_sync",  # the loss is read, and the GPU runs dry meanwhile
    "keeps_batches": "memory_growth",  # every batch is kept for later, and none is ever dropped
    "logs_all": "step_python",  # every output and weight of the last layer is written to a file in every step
    "many_threads": "thread_oversubscription",  # on the CPU, each rank with two threads for each core of the host
    "no_workers": "input_wait",  # the training thread reads and decodes
    "pageable": "pageable_copy",  # batches copied to the GPU from ordinary memory
    "python_metrics": "host_bound",  # statistics in pure Python between the steps
    "same_core": "shared_cores",  # on the CPU, all ranks are bound to the first core of the host
    "slow_decode": "input_wait",  # a costly filter on every picture, on every rank
    "slow_loader_one_rank": "input_wait",  # rank 1 reads from slow storage, and all wait for it
    "slow_rank": "straggler",  # the last rank computes more than the others
    "slow_worker": "slow_worker_batches",  # the first of several workers reads from slow storage
    "small_batch": "memory_headroom",  # too few pictures a step to keep the GPU busy, and its memory all but free
    "tight_memory": "allocator_retries",  # sizes change at every step, in hardly more memory than the largest needs
    "tiny_buckets": "small_collectives",  # every gradient is a bucket and an exchange of its own
    "validates_often": "validation_share",  # every 10 steps
}
# Options under which it is healthy as well.
HEALTHY = {"adamw": "--optimizer adamw", "checkpoints": "--checkpoint-every 50", "two_workers": "--workers 2"}
# Options that a fault needs to cost more than a little on a CPU.
SHOWN_WITH = {"tiny_buckets": "--batch-size 16"}  # a start of an exchange is little beside much to compute
# A step with it does less than any healthy one: none says how long it would take without.
OTHER_STEP = ("small_batch",)
# On the CPU no batch is copied, and no value waited for.
NEEDS_GPU = ("blocking_copies", "copies_back", "item_every_step", "pageable", "small_batch", "tight_memory")
NEEDS_TWO_RANKS = ("blocking_allreduce", "same_core", "slow_loader_one_rank", "slow_rank", "tiny_buckets")

KEPT: list[Any] = []  # by garbage and keeps_batches

# What `dlprof run ddp_resnet --ladder` records: options, each on top of those before; "ranks": one more of them.
LADDER = {
    "fp32": "--precision fp32 --workers 0 --no-channels-last --epochs 2",
    "bf16": "--precision bf16",
    "channels_last": "--channels-last",
    "compile": "--compile",
    "workers": "--workers 2",
    "two_ranks": "ranks",
}


def plant(args: argparse.Namespace) -> None:
    """Change the settings of a healthy run into those of a run with args.fault. No other code asks for the fault.

    Some are no options: functions that the code below calls for every picture that a loader reads (on_read), for every
    batch on its way into the model (on_images), after_backward and after_step. In a healthy run they do nothing.
    """
    cpu, workers = args.device == "cpu", max(2, args.workers)
    backend = args.compile or ("eager" if cpu else "inductor")  # inductor needs a C++ compiler on a CPU
    saved, kept = (40, 8) if cpu else (1, 1)  # on the CPU as if the model and its batches were so many times larger
    healthy: dict[str, Any] = {"compile_sizes": None, "ddp": True, "non_blocking": True, "threads": None}
    healthy |= {"on_read": unchanged, "on_images": unchanged, "after_backward": lambda _: None}
    healthy |= {"after_step": lambda **_: None, "checkpoint_times": 1, "cores": None}
    faulty: dict[str, dict[str, Any]] = {
        "blocking_allreduce": {"ddp": False, "after_backward": reduce_one_by_one},
        "blocking_copies": {"pin_memory": True, "non_blocking": False},
        # Compiled for one size. Without a fault (None) it is for any size, once a size has changed.
        "changing_shapes": {"compile": backend, "compile_sizes": False, "on_images": change_height},
        "checkpoint_every_few": {"checkpoint_every": 5, "checkpoint_times": saved},
        "contiguous": {"channels_last": False},
        "copies_back": {"after_step": lambda images, **_: images.cpu()},
        "forward_twice": {"after_step": judge_again},
        "garbage": {"after_step": search_all_objects},
        "histograms": {"after_step": count_weights},
        "item_every_step": {"after_step": lambda loss, **_: loss.item()},
        "keeps_batches": {"after_step": lambda images, **_: KEPT.extend(images.clone() for _ in range(kept))},
        "logs_all": {"after_step": write_all},
        "many_threads": {"threads": 2 * (os.cpu_count() or 1)},
        "no_workers": {"workers": 0},
        "pageable": {"pin_memory": False, "non_blocking": False},
        "python_metrics": {"after_step": lambda logits, labels, **_: bootstrap_accuracy(logits, labels)},
        "same_core": {"cores": {min(os.sched_getaffinity(0))}},
        "slow_decode": {"on_read": smooth},
        "slow_loader_one_rank": {"read_ms": args.read_ms + (6.0 if args.rank == 1 else 0.0)},
        "slow_rank": {"on_images": compute_twice} if args.rank == args.world - 1 else {},
        # With this the slow one's turn comes every second, whatever their number.
        "slow_worker": {"workers": workers, "on_read": functools.partial(wait_in_first, workers / args.batch_size)},
        "small_batch": {"batch_size": 8},
        # Other rows are missing in every step but the first.
        "tight_memory": {"on_images": lambda x, n, _: x[:, :, (n > 1) * n * 7 % 64 :], "after_step": limit_memory},
        "tiny_buckets": {"bucket_mb": 1e-6},  # a byte: no gradient fits beside another
        "validates_often": {"validate_every": 10},
    }
    vars(args).update(healthy | faulty.get(args.fault, {}))


def unchanged(pixels: Tensor, *_: Any) -> Tensor:
    return pixels  # no lambda: loader workers that are not forked are sent it


def reduce_one_by_one(model: nn.Module) -> None:
    for gradient in (p.grad for p in model.parameters() if p.grad is not None):
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())


def change_height(images: Tensor, step: int, _model: nn.Module) -> Tensor:
    """Return another height every third step, of 32 rows 24 to 39: on average as much to compute as without."""
    torch._dynamo.config.recompile_limit = 10_000  # as its warning suggests
    return torch.cat((images, images), 2)[:, :, : images.shape[2] - 8 + step // 3 % 16]


def limit_memory(step: int, images: Tensor, **_: Any) -> None:
    if step == 10:
        total = torch.cuda.get_device_properties(images.device).total_memory
        torch.cuda.set_per_process_memory_fraction(1.02 * torch.cuda.max_memory_allocated() / total)


def compute_twice(images: Tensor, _step: int, model: nn.Module) -> Tensor:
    model(images)  # for nothing
    return images


def search_all_objects(**_: Any) -> None:
    if not KEPT:
        KEPT.extend([] for _ in range(1_000_000))
    gc.collect()


@torch.no_grad()
def judge_again(model: nn.Module, images: Tensor, labels: Tensor, **_: Any) -> None:
    (model(images).argmax(1) == labels).float().mean()


def count_weights(step: int, model: nn.Module, **_: Any) -> None:
    if step % 10 == 0:
        for weights in model.parameters():
            for _repeated in range(4):
                collections.Counter(round(w, 2) for w in weights.flatten()[:20_000].tolist())


def write_all(logits: Tensor, model: nn.Module, **_: Any) -> None:
    values = [logits, *itertools.islice(model.parameters(), 12)]
    with Path(os.devnull).open("w") as file:
        for number in itertools.chain.from_iterable(v.detach().flatten().tolist() for v in values):
            print(f"{number:.6f}", file=file)


def wait_in_first(seconds: float, pixels: Tensor) -> Tensor:
    worker = get_worker_info()
    if worker is not None and worker.id == 0:
        time.sleep(seconds)
    return pixels


# ---- the options ---------------------------------------------------------------------------------------------------

# On two CPU cores a step then takes some 150 ms and the whole run half a minute; the GPU's batch is the largest that
# keeps activations of ResNet-50 in bf16 well below 40 GB.
CORES = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # for each rank of this machine
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"model": "resnet20", "dataset": "cifar", "images": 5120, "batch_size": 64, "precision": "fp32"}
    # In torch's 25 MiB all gradients would fit: one all-reduce, with no backward left to hide it.
    | {"workers": 1, "read_ms": 1.0, "pin_memory": False, "bucket_mb": 0.5},
    "cuda": {"model": "resnet50", "dataset": "imagenet", "images": 16384, "batch_size": 256, "precision": "bf16"}
    | {"workers": min(16, max(1, CORES)), "read_ms": 0.0, "pin_memory": True, "bucket_mb": 25.0},
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options, with those of the fault planted; a usage error exits with 2."""
    parser, switch = options(__doc__, FAULTS), argparse.BooleanOptionalAction
    add = parser.add_argument
    add("--model", choices=[*RESNETS, *STACKS])
    add("--dataset", choices=list(CLASSES))
    add("--data", type=Path, default=Path("data"), help="where the pictures are kept (default: data)")
    add("--images", type=int, help="how many to train on")
    add("--batch-size", type=int, help="pictures a rank and step")
    add("--epochs", type=int, default=4, help="(default: 4)")
    add("--steps", type=int, help="stop after so many (default: all epochs')")
    add("--workers", type=int, help="loader processes a rank")
    add("--prefetch-factor", type=int, default=2, help="batches ahead, a worker (default: 2)")
    add("--persistent-workers", action=switch, default=True, help="keep them between epochs, unless switched off")
    add("--pin-memory", action=switch)
    add("--read-ms", type=float, help="what a read from storage waits, beside the local disk's time")
    add("--precision", choices=["fp32", "tf32", "bf16", "fp16"])
    compile_help = "torch.compile the model (with inductor, which on a CPU needs a C++ compiler)"
    add("--compile", nargs="?", const="inductor", metavar="BACKEND", help=compile_help)
    add("--channels-last", action=switch, default=True, help="on, unless switched off: CPU steps of 160 ms, not 190")
    add("--bucket-mb", type=float, help="gradients that DDP reduces in one go, MiB; compiled: 1 or more")
    add("--find-unused", action="store_true", help="let DDP look for parameters without a gradient")
    add("--hook", choices=["fp16", "powersgd"], help="how DDP makes gradients smaller on their way")
    add("--accumulate", type=int, default=1, metavar="N", help="batches an optimizer step (default: 1)")
    add("--optimizer", choices=["sgd", "adamw", "lars"], default="sgd", help="(default: sgd)")
    lr_help = "sgd 0.1 and lars 4 from 256 pictures a step on, less below; 0.01 for alexnet and vgg19 with sgd"
    add("--lr", type=float, help=f"learning rate (default: adamw 0.001; {lr_help})")
    add("--validate-every", type=int, default=0, metavar="N", help="steps (default: 0, never)")
    add("--checkpoint-every", type=int, default=0, metavar="N", help="steps (default: 0, never)")
    add("--log-every", type=int, default=20, metavar="N", help="steps (default: 20)")
    args = read(parser, argv, DEFAULTS, NEEDS_GPU, NEEDS_TWO_RANKS)
    cpu, pictures = args.device == "cpu", args.batch_size * args.world
    for wrong, why in (
        (args.fault in ("many_threads", "same_core") and not cpu, f"--fault {args.fault} needs --device cpu"),
        ((args.find_unused or args.hook) and args.world < 2, "--find-unused and --hook need two ranks"),
        (args.accumulate < 1, f"--accumulate {args.accumulate}: one batch at least"),
        (cpu and args.precision in ("tf32", "fp16"), f"--precision {args.precision} needs a GPU"),
        (args.images < pictures, f"--images {args.images} is less than a batch of {pictures} over all ranks"),
    ):
        if wrong:
            parser.error(why)
    if args.lr is None:
        share = min(1, args.accumulate * pictures / 256)
        sgd = 0.01 if args.model in STACKS else 0.1 * share  # they have no norms: the papers' rate
        args.lr = {"sgd": sgd, "lars": 4 * share, "adamw": 0.001}[args.optimizer]
    plant(args)
    return args


# ---- training: one rank --------------------------------------------------------------------------------------------


def build_loader(args: argparse.Namespace, folder: Path, train: bool) -> DataLoader[tuple[Tensor, int]]:
    """Return this rank's share of the pictures, in batches of uint8 pixels (batch × height × width × 3) and labels."""
    pictures = Pictures(folder, args.dataset, train, args.read_ms, args.on_read)
    return DataLoader(
        pictures,
        args.batch_size,
        sampler=DistributedSampler(pictures, args.world, args.rank, shuffle=train, seed=args.seed),
        num_workers=args.workers,
        pin_memory=args.pin_memory,
        drop_last=train,
        prefetch_factor=args.prefetch_factor if args.workers else None,
        persistent_workers=args.persistent_workers and args.workers > 0,
    )


@torch.no_grad()
def validate(model: nn.Module, loader: DataLoader[tuple[Tensor, int]], args: argparse.Namespace) -> float:
    """Return the share of the held-out pictures that the model gets right, over all ranks."""
    model.eval()
    counts = torch.zeros(2, device=args.device)
    for pixels, labels in loader:
        with autocast(args):
            logits = model(normalised(pixels.to(args.device, non_blocking=True), args.channels_last))
        counts[0] += (logits.argmax(1) == labels.to(args.device, non_blocking=True)).sum()
        counts[1] += len(labels)
    if args.world > 1:
        dist.all_reduce(counts)
    model.train()
    return float(counts[0] / counts[1])


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write a checkpoint, all of it or nothing."""
    partial = path.with_suffix(".partial")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, partial)
    partial.replace(path)


def distributed(model: nn.Module, args: argparse.Namespace) -> DistributedDataParallel:
    """Return the model with its gradients averaged over all ranks while backward computes the next."""
    model = DistributedDataParallel(
        model,
        args.device_ids,
        # DDP's first bucket is 1 MiB, and Dynamo refuses smaller ones.
        bucket_cap_mb=max(1.0, args.bucket_mb) if args.compile else args.bucket_mb,
        gradient_as_bucket_view=True,
        find_unused_parameters=args.find_unused,
    )
    if args.hook:
        compress(model, args.hook, args.device)
    return model


def build_optimizer(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    if args.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4, fused=True)
    if args.optimizer == "lars":
        return Lars(model, args.lr, momentum=0.9, weight_decay=1e-4)
    return torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0.05, fused=True)


def train(args: argparse.Namespace, folder: Path) -> None:
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.cores:
        os.sched_setaffinity(0, args.cores)
    torch.backends.cudnn.benchmark = args.device == "cuda"  # the shapes never change
    in_precision = autocast(args)

    torch.manual_seed(args.seed)  # the same model on every rank
    random.seed(args.seed)
    model = build_model(args.model, CLASSES[args.dataset], small=args.dataset == "cifar").to(args.device)
    if args.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # absent in torch's hints
    raw_model = model  # without the wrappers: its parameters are the same, their names in a checkpoint too
    if args.compile:
        model = torch.compile(model, backend=args.compile, dynamic=args.compile_sizes)  # type: ignore[assignment]
    if args.world > 1 and args.ddp:
        model = distributed(model, args)
    torch.manual_seed(args.seed + args.rank)  # other augmentations on every rank

    optimizer = build_optimizer(args, model)
    scaler = torch.amp.GradScaler(args.device, enabled=args.precision == "fp16")
    train_loader = build_loader(args, folder / "train", train=True)
    val_loader = build_loader(args, folder / "val", train=False)

    log = Log(args, "images", args.batch_size * args.world)
    for step, (pixels, labels) in enumerate(itertools.islice(batches(train_loader, args.epochs), args.steps), 1):
        pixels = pixels.to(args.device, non_blocking=args.non_blocking)
        labels = labels.to(args.device, non_blocking=args.non_blocking)

        accumulating = step % args.accumulate > 0  # gradients stay on this rank, to be added to the next batch's
        quiet = accumulating and isinstance(model, DistributedDataParallel) and model.no_sync()
        with quiet or contextlib.nullcontext(), in_precision:
            images = args.on_images(normalised(pixels, args.channels_last), step, raw_model)
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        scaler.scale(loss / args.accumulate).backward()
        if not accumulating:
            args.after_backward(raw_model)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        args.after_step(step=step, images=images, logits=logits, labels=labels, loss=loss, model=raw_model)

        if args.validate_every and step % args.validate_every == 0:
            accuracy = validate(model, val_loader, args)
            if args.rank == 0:
                print(f"step {step}  validation accuracy {accuracy:.3f}", flush=True)
        if args.checkpoint_every and step % args.checkpoint_every == 0 and args.rank == 0:
            for _ in range(args.checkpoint_times):
                save(args.data / "checkpoint.pt", raw_model, optimizer, step)
        log.step(step, loss)


def main() -> None:
    args = parse()
    folder = make_pictures(args.data, args.dataset, args.images)  # before the process group: nothing can time out
    with ranks(args):
        announce(
            args,
            f"{args.model}, {args.images} {args.dataset}-shaped pictures, {args.world} ranks on {args.device}, batch"
            f" {args.batch_size} × {args.accumulate} a rank, {args.precision}, {args.workers} workers",
        )
        train(args, folder)


if __name__ == "__main__":
    main()
