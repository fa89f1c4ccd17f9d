"""Train a ResNet, VGG-19 or AlexNet on pictures with DistributedDataParallel, well, or with one of FAULTS planted.

    python workloads/ddp_resnet.py                                     one process
    torchrun --nproc-per-node 2 workloads/ddp_resnet.py                one process a GPU, or a CPU rank each
    torchrun --nproc-per-node 2 workloads/ddp_resnet.py --fault slow_rank

The pictures are made once, into PNG files under --data, and read back the way real ones are: a file a sample, decoded
and augmented by the loader's workers. Needs Pillow for that: pip install pillow. Otherwise plain PyTorch: any profiler
can be pointed at it, and none is imported. Read it from top to bottom: faults, models, pictures, options, training.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import gc
import itertools
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info

# ---- the faults ----------------------------------------------------------------------------------------------------

# What can be planted, and the dlprof rule that must notice it. plant() has a line for each.
FAULTS = {
    "blocking_allreduce": "exposed_communication",  # gradients reduced one by one, after backward
    "blocking_copies": "blocking_copy",  # batches from pinned memory, each of which the script waits for
    "changing_shapes": "recompilation",  # compiled for one size of pictures, and the size changes
    "checkpoint_every_few": "checkpoint_stall",  # the whole state saved over and over, every 5 steps
    "copies_back": "exposed_copy",  # every batch's pictures are fetched from the GPU again, as if to look at them
    "garbage": "gc_pauses",  # many objects live on, and every step has them all searched, as if to save memory
    "item_every_step": "host_sync",  # the loss is read, and the GPU runs dry meanwhile
    "keeps_batches": "memory_growth",  # every batch is kept for later, and none is ever dropped
    "many_threads": "thread_oversubscription",  # on the CPU, each rank with two threads for each core of the host
    "no_workers": "input_wait",  # the training thread reads and decodes
    "pageable": "pageable_copy",  # batches copied to the GPU from ordinary memory
    "python_metrics": "host_bound",  # statistics in pure Python between the steps
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
NEEDS_GPU = ("blocking_copies", "copies_back", "item_every_step", "pageable", "small_batch", "tight_memory")
NEEDS_TWO_RANKS = ("blocking_allreduce", "slow_loader_one_rank", "slow_rank", "tiny_buckets")

KEPT: list[Any] = []  # by garbage and keeps_batches


def plant(args: argparse.Namespace) -> None:
    """Change the settings of a healthy run into those of a run with args.fault. No other code asks for the fault.

    Some are no options: functions that the code below calls for every picture that a loader reads (on_read), for every
    batch on its way into the model (on_images), after_backward and after_step. In a healthy run they do nothing.
    """
    cpu, workers = args.device == "cpu", max(2, args.workers)
    healthy: dict[str, Any] = {"compile_sizes": None, "ddp": True, "non_blocking": True, "threads": None}
    healthy |= {"on_read": unchanged, "on_images": unchanged, "after_backward": lambda _: None}
    healthy["after_step"] = lambda **_: None
    faulty: dict[str, dict[str, Any]] = {
        "blocking_allreduce": {"ddp": False, "after_backward": reduce_one_by_one},
        "blocking_copies": {"pin_memory": True, "non_blocking": False},
        "changing_shapes": {
            "compile": args.compile or ("eager" if cpu else "inductor"),
            "compile_sizes": False,  # for one; None: once a size has changed, for any
            "on_images": change_height,
        },
        # On the CPU as if its small model, and below its batches, were so many times larger.
        "checkpoint_every_few": {"after_step": functools.partial(save_every_five, args, 40 if cpu else 1)},
        "copies_back": {"after_step": lambda images, **_: images.cpu()},
        "garbage": {"after_step": search_all_objects},
        "item_every_step": {"after_step": lambda loss, **_: loss.item()},
        "keeps_batches": {
            "after_step": lambda images, **_: KEPT.extend(images.clone() for _ in range(8 if cpu else 1))
        },
        "many_threads": {"threads": 2 * (os.cpu_count() or 1)},
        "no_workers": {"workers": 0},
        "pageable": {"pin_memory": False, "non_blocking": False},
        "python_metrics": {"after_step": python_metrics},
        "slow_decode": {"on_read": smooth},
        "slow_loader_one_rank": {"read_ms": args.read_ms + (6.0 if args.rank == 1 else 0.0)},
        "slow_rank": {"on_images": compute_twice} if args.rank == args.world - 1 else {},
        # With this the slow one's turn comes every second, whatever their number.
        "slow_worker": {"workers": workers, "on_read": functools.partial(wait_in_first, workers / args.batch_size)},
        "small_batch": {"batch_size": 8},
        "tight_memory": {
            "on_images": lambda images, step, _: images[:, :, step * 7 % 64 :] if step > 1 else images,
            "after_step": limit_memory,
        },
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


def save_every_five(args: argparse.Namespace, times: int, step: int, **state: Any) -> None:
    for _time in range(times if step % 5 == 0 and args.rank == 0 else 0):
        save(args.data / "checkpoint.pt", state["model"], state["optimizer"], step)


def search_all_objects(**_: Any) -> None:
    if not KEPT:
        KEPT.extend([] for _ in range(1_000_000))
    gc.collect()


def python_metrics(logits: Tensor, labels: Tensor, **_: Any) -> tuple[float, float]:
    """Return the bounds of the batch's top-3 accuracy, 95 % of bootstrap samples between them, in loops of Python."""
    hits = []
    for scores, label in zip(logits.tolist(), labels.tolist(), strict=True):
        best = sorted(range(len(scores)), key=scores.__getitem__)[-3:]
        hits.append(label in best)
    shares = sorted(sum(random.choices(hits, k=len(hits))) / len(hits) for _ in range(10_000))
    return shares[250], shares[-250]


def smooth(pixels: Tensor) -> Tensor:
    """Return the picture without its grain, by a blur at many times its resolution: much work for little gain."""
    planes = pixels.permute(2, 0, 1)[None].float()
    large = F.avg_pool2d(F.interpolate(planes, (320, 320), mode="bilinear"), 5, 1, 2)
    return F.interpolate(large, planes.shape[2:], mode="area")[0].permute(1, 2, 0).byte()


def wait_in_first(seconds: float, pixels: Tensor) -> Tensor:
    worker = get_worker_info()
    if worker is not None and worker.id == 0:
        time.sleep(seconds)
    return pixels


# ---- the models ----------------------------------------------------------------------------------------------------


def conv_norm(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """Return a convolution that keeps the resolution (or divides it by its stride), and its norm."""
    return [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs)]


class Block(nn.Module):
    """Convolutions and a way around them: two 3×3, or as a bottleneck 1×1, 3×3 and 1×1, which shrink and widen."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        self.outputs = 4 * width if bottleneck else width
        shapes = [(inputs, width, 3, stride), (width, width, 3, 1)]
        if bottleneck:
            shapes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, self.outputs, 1, 1)]
        layers = [layer for shape in shapes for layer in (*conv_norm(*shape), nn.ReLU(inplace=True))]
        self.layers = nn.Sequential(*layers[:-1])
        same = inputs == self.outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*conv_norm(inputs, self.outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's features, as many channels as `outputs`."""
        return F.relu(self.layers(x) + self.shortcut(x), inplace=True)


def resnet(bottleneck: bool, width: int, blocks: list[int], classes: int, small: bool) -> nn.Sequential:
    """Return stages of residual blocks, each with half the resolution and twice the channels of the one before."""
    # 32×32 pictures cannot afford to lose resolution before the first stage.
    layers = [*conv_norm(3, width, *((3, 1) if small else (7, 2))), nn.ReLU(inplace=True)]
    if not small:
        layers.append(nn.MaxPool2d(3, 2, 1))
    channels = width
    for stage, count in enumerate(blocks):
        for position in range(count):
            block = Block(channels, width * 2**stage, 2 if stage > 0 and position == 0 else 1, bottleneck)
            layers.append(block)
            channels = block.outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


Layers = list[tuple[int, int, int] | int]


def stack(convolutions: Layers, grid: int, classes: int, small: bool) -> nn.Sequential:
    """Return convolutions one after the other, max pooling between some, and three large linear layers behind them."""
    layers: list[nn.Module] = []
    channels = 3
    for convolution in convolutions:
        if isinstance(convolution, int):
            layers.append(nn.MaxPool2d(convolution, 2))
            continue
        width, kernel, stride = (convolution[0], 3, 1) if small else convolution
        layers += [nn.Conv2d(channels, width, kernel, stride, (kernel - 1) // 2), nn.ReLU(inplace=True)]
        channels = width
    grid, hidden = (1, 512) if small else (grid, 4096)  # of 32×32 pictures hardly more than a point is left
    layers += [nn.AdaptiveAvgPool2d(grid), nn.Flatten(), nn.Linear(channels * grid**2, hidden)]
    layers += [nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(hidden, hidden)]
    return nn.Sequential(*layers, nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(hidden, classes))


# He et al., Deep Residual Learning for Image Recognition, 2015: bottlenecks, width, and blocks of each stage.
RESNETS = {
    "resnet18": (False, 64, [2, 2, 2, 2]),
    "resnet20": (False, 16, [3, 3, 3]),  # the paper's smallest for 32×32: light enough for two CPU cores
    "resnet34": (False, 64, [3, 4, 6, 3]),
    "resnet50": (True, 64, [3, 4, 6, 3]),
    "resnet101": (True, 64, [3, 4, 23, 3]),
    "resnet152": (True, 64, [3, 8, 36, 3]),
}
# Width, kernel and stride of each convolution, and between them the window of each max pooling; then the grid of points
# that the linear layers see. Most of the weights are theirs: many bytes to exchange for little computing.
ALEXNET: Layers = [(64, 11, 4), 3, (192, 5, 1), 3, (384, 3, 1), (256, 3, 1), (256, 3, 1), 3]
VGG19: Layers = [*[(64, 3, 1)] * 2, 2, *[(128, 3, 1)] * 2, 2, *[(256, 3, 1)] * 4, 2]
VGG19 += [*[(512, 3, 1)] * 4, 2] * 2
STACKS = {
    "alexnet": (ALEXNET, 6),  # Krizhevsky, One Weird Trick for Parallelizing Convolutional Neural Networks, 2014
    "vgg19": (VGG19, 7),  # Simonyan and Zisserman, Very Deep Convolutional Networks for Image Recognition, 2014
}


def build_model(name: str, classes: int, small: bool) -> nn.Module:
    """Return a new model of pictures (batch × 3 × height × width); `small` is the one for 32×32 pictures."""
    model = stack(*STACKS[name], classes, small) if name in STACKS else resnet(*RESNETS[name], classes, small)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):  # signals keep their size through many layers
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


class Lars(torch.optim.SGD):
    """SGD in which each layer's step is scaled to its weights: You et al., Large Batch Training of Conv. Nets, 2017."""

    def __init__(self, model: nn.Module, lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(model.parameters(), lr, momentum, foreach=True)
        self.weight_decay = weight_decay

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override] # noqa: ARG002 - nobody passes one
        """Scale the gradients, and update every weight that has one. Biases and norms step as with SGD."""
        weights = [p for p in self.param_groups[0]["params"] if p.dim() > 1 and p.grad is not None]
        gradients = [p.grad for p in weights]
        sizes = torch.stack(torch._foreach_norm(weights))
        slopes = torch.stack(torch._foreach_norm(gradients)) + self.weight_decay * sizes
        trusted = torch.where((sizes > 0) & (slopes > 0), 0.001 * sizes / slopes, 1.0)
        torch._foreach_add_(gradients, weights, alpha=self.weight_decay)
        torch._foreach_mul_(gradients, list(trusted.unbind()))
        super().step()


# ---- the pictures --------------------------------------------------------------------------------------------------

CLASSES = {"cifar": 10, "imagenet": 1000}
Pixels = npt.NDArray[np.uint8]  # height × width × 3


def pillow() -> ModuleType:
    """Return PIL.Image; where it is missing, exit with how to install it."""
    try:
        from PIL import Image
    except ImportError:
        sys.exit("ddp_resnet.py needs Pillow: pip install pillow")  # or dlprof's extra: workloads
    return Image


def draw_picture(dataset: str, label: int, rng: np.random.Generator) -> Pixels:
    """Return a new picture: the class's 4 × 4 colours blended with random ones, stretched, and grain on top."""

    def blend(length: int) -> Any:  # the weights, length × 4, that stretch four values linearly over so many pixels
        return np.maximum(
            0, 1 - np.abs(np.linspace(0, 3, length, dtype=np.float32)[:, None] - np.arange(4, dtype=np.float32))
        )

    height, width = (32, 32) if dataset == "cifar" else rng.integers((350, 300), (450, 400)).tolist()
    pattern = np.random.default_rng([7, label]).random((4, 4, 3), np.float32)
    grid = 160 * pattern + 64 * rng.random((4, 4, 3), np.float32) + 12
    smooth = np.einsum("yi,ijc,xj->yxc", blend(height), grid, blend(width), optimize=True)
    # Four grey levels of noise: a 400×350 picture then takes some 150 kB, and some 2 ms of a core to decode.
    pixels: Pixels = smooth.astype(np.uint8) + rng.integers(0, 4, smooth.shape, np.uint8)
    return pixels


def make_pictures(data: Path, dataset: str, images: int) -> Path:
    """Return the folder with train/CLASS/*.png and val/CLASS/*.png (an eighth as many), made unless it is there.

    Every rank may call it: the first one that comes draws, and the others wait on the lock. The folder gets its name
    when all is in it, so that what an interrupted run left half done is drawn again.
    """
    image = pillow()
    folder, partial = data / f"{dataset}-{images}", data / f"{dataset}-{images}.partial"
    data.mkdir(parents=True, exist_ok=True)

    def draw(split: str, index: int) -> None:
        label = index % CLASSES[dataset]
        file = partial / split / f"{label:04d}" / f"{index:06d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = draw_picture(dataset, label, np.random.default_rng([split == "val", index]))
        image.fromarray(pixels).save(file, compress_type=2)  # Huffman codes alone: noise holds no repetitions

    with (data / f"{dataset}-{images}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            print(f"drawing {images} pictures into {folder}", flush=True)
            shutil.rmtree(partial, ignore_errors=True)
            with ThreadPoolExecutor() as pool:
                list(pool.map(draw, ["train"] * images, range(images)))
                list(pool.map(draw, ["val"] * images, range(-(-images // 8))))
            partial.rename(folder)
    return folder


class Pictures(Dataset[tuple[Tensor, int]]):
    """The pictures of one split. A sample is its pixels (height × width × 3, uint8) and its class."""

    def __init__(
        self, folder: Path, dataset: str, train: bool, read_ms: float, on_read: Callable[[Tensor], Tensor]
    ) -> None:
        self.files = sorted(folder.glob("*/*.png"))
        self.dataset, self.train, self.read_ms, self.on_read = dataset, train, read_ms, on_read

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self.read_ms / 1e3)  # files this few come from memory; those of a real set come over a network
        pixels = self.on_read(torch.from_numpy(np.array(pillow().open(self.files[index]))))
        if self.dataset == "cifar":
            pixels = shifted(pixels) if self.train else pixels
        else:
            box = random_box(pixels) if self.train else pixels
            planes = box.permute(2, 0, 1)[None]
            pixels = F.interpolate(planes, (224, 224), mode="bilinear", antialias=True)[0].permute(1, 2, 0)
        if self.train and torch.rand(()) < 0.5:
            pixels = pixels.flip(1)
        return pixels, int(self.files[index].parent.name)


def shifted(pixels: Tensor, by: int = 4) -> Tensor:
    """Return the picture moved by up to `by` pixels each way, black where nothing is left."""
    height, width, _ = pixels.shape
    y, x = torch.randint(0, 2 * by + 1, (2,)).tolist()
    return F.pad(pixels, (0, 0, by, by, by, by))[y : y + height, x : x + width]


def random_box(pixels: Tensor) -> Tensor:
    """Return a box of the picture, 8 to 100 % of its area and between 3:4 and 4:3, as the paper's training does."""
    height, width, _ = pixels.shape
    u, v, y, x = torch.rand(4).tolist()
    area, ratio = height * width * (0.08 + 0.92 * u), (3 / 4) ** (1 - 2 * v)
    h, w = min(height, round((area / ratio) ** 0.5)), min(width, round((area * ratio) ** 0.5))
    top, left = int(y * (height - h + 1)), int(x * (width - w + 1))
    return pixels[top : top + h, left : left + w]


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
    """Read the command line and fill what it leaves open with the device's DEFAULTS; a usage error exits with 2."""
    faults = "\n".join(f"  {name:22s} must be noticed by {rule}" for name, rule in FAULTS.items())
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog=f"faults:\n{faults}\n\nOptions without a stated default have one for the CPU and one for GPUs.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, switch = parser.add_argument, argparse.BooleanOptionalAction
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
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
    add(
        "--channels-last", action=switch, default=True, help="on, unless switched off"
    )  # on the CPU steps of 160 ms, not 190
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
    add("--seed", type=int, default=0, help="(default: 0)")
    add("--fault", choices=list(FAULTS), help="plant this mistake")
    parser.set_defaults(**DEFAULTS[parser.parse_known_args(argv)[0].device])
    args = parser.parse_args(argv)

    # torchrun says who we are; without it we are the only rank.
    args.rank, args.world, args.local_rank = (
        int(os.environ.get(name, alone)) for name, alone in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
    )
    if args.lr is None:
        share = min(1, args.batch_size * args.accumulate * args.world / 256)
        sgd = 0.01 if args.model in STACKS else 0.1 * share  # they have no norms: the papers' rate
        args.lr = {"sgd": sgd, "lars": 4 * share, "adamw": 0.001}[args.optimizer]

    cpu, alone = args.device == "cpu", args.world < 2
    fault, two_ranks = f"--fault {args.fault} needs", f"two ranks: torchrun --nproc-per-node 2 {parser.prog} ..."
    small = f"is not one batch of {args.batch_size} for each of {args.world} ranks"
    for wrong, why in (
        (args.fault in NEEDS_GPU and cpu, f"{fault} a GPU: on the CPU no batch is copied and no value waited for"),
        (args.fault == "many_threads" and not cpu, f"{fault} --device cpu: a GPU's operators take one thread"),
        (args.fault in NEEDS_TWO_RANKS and alone, f"{fault} {two_ranks}"),
        ((args.find_unused or args.hook) and alone, f"--find-unused and --hook need {two_ranks}"),
        (args.accumulate < 1, f"--accumulate {args.accumulate}: one batch at least"),
        (cpu and args.precision in ("tf32", "fp16"), f"--precision {args.precision} needs a GPU"),
        (args.images < args.batch_size * args.world, f"--images {args.images} {small}"),
    ):
        if wrong:
            parser.error(why)
    return args


# ---- training: one rank --------------------------------------------------------------------------------------------


def batches(loader: DataLoader[tuple[Tensor, int]], epochs: int) -> Iterator[tuple[int, Any]]:
    """Return every batch of every epoch with its epoch."""
    for epoch in range(epochs):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)  # else every epoch has the order of the first
        for batch in loader:
            yield epoch, batch


def normalised(pixels: Tensor, args: argparse.Namespace) -> Tensor:
    """Return pixels (batch × height × width × 3, uint8) as the model wants them: batch × 3 × height × width, around 0.

    Done on the device: bytes are a quarter of what floats would cost on their way there.
    """
    planes = pixels.permute(0, 3, 1, 2)  # already channels last in memory
    return (planes if args.channels_last else planes.contiguous()).float().sub_(127.5).div_(32.0)


@torch.no_grad()
def validate(model: nn.Module, loader: DataLoader[tuple[Tensor, int]], args: argparse.Namespace) -> float:
    """Return the share of the held-out pictures that the model gets right, over all ranks."""
    model.eval()
    counts = torch.zeros(2, device=args.device)
    for pixels, labels in loader:
        with args.autocast:
            logits = model(normalised(pixels.to(args.device, non_blocking=True), args))
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


def in_turn(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return DDP's hook, made to take a bucket when it is done with the one before.

    PowerSGD exchanges a bucket several times, and gloo's threads begin what follows the first exchange: several buckets
    at once in an order that each rank has for itself, and the ranks would wait for each other forever.
    """
    before: list[Any] = []

    @functools.wraps(hook)  # DDP reads its signature
    def call(state: Any, bucket: Any) -> Any:
        if before:
            before.pop().wait()
        before.append(hook(state, bucket))
        return before[0]

    return call


def distributed(model: nn.Module, args: argparse.Namespace) -> DistributedDataParallel:
    """Return the model with its gradients averaged over all ranks while backward computes the next."""
    model = DistributedDataParallel(
        model,
        device_ids=[args.local_rank] if args.device == "cuda" else None,
        # DDP's first bucket is 1 MiB, and Dynamo refuses smaller ones.
        bucket_cap_mb=max(1.0, args.bucket_mb) if args.compile else args.bucket_mb,
        gradient_as_bucket_view=True,
        find_unused_parameters=args.find_unused,
    )
    if args.hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if args.hook == "powersgd":  # after as many steps as the paper's authors found enough to settle
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=10)
        hook = powerSGD_hook.powerSGD_hook
        model.register_comm_hook(state, in_turn(hook) if args.device == "cpu" else hook)
    return model


def main() -> None:
    args = parse()
    plant(args)
    folder = make_pictures(args.data, args.dataset, args.images)  # before the process group: nothing can time out

    if args.threads:
        torch.set_num_threads(args.threads)
    if args.device == "cuda":
        torch.cuda.set_device(args.local_rank)
        torch.backends.cudnn.benchmark = True  # the shapes never change
        torch.backends.cudnn.allow_tf32 = args.precision == "tf32"  # on by default, and then fp32 is not fp32
        torch.backends.cuda.matmul.allow_tf32 = args.precision == "tf32"
    dtype = torch.float16 if args.precision == "fp16" else torch.bfloat16
    args.autocast = torch.autocast(args.device, dtype, enabled=args.precision in ("fp16", "bf16"))
    if args.world > 1:
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    if args.rank == 0:
        print(
            f"{args.model}, {args.images} {args.dataset}-shaped pictures, {args.world} ranks on {args.device}, "
            f"batch {args.batch_size}{f' × {args.accumulate}' if args.accumulate > 1 else ''} a rank, "
            f"{args.precision}, {args.workers} workers, fault: {args.fault or 'none'}",
            flush=True,
        )

    torch.manual_seed(args.seed)  # the same model on every rank
    random.seed(args.seed)
    model: nn.Module = build_model(args.model, CLASSES[args.dataset], small=args.dataset == "cifar").to(args.device)
    if args.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # absent in torch's hints
    raw_model = model  # without the wrappers: its parameters are the same, their names in a checkpoint too
    if args.compile:
        model = torch.compile(model, backend=args.compile, dynamic=args.compile_sizes)  # type: ignore[assignment]
    if args.world > 1 and args.ddp:
        model = distributed(model, args)
    torch.manual_seed(args.seed + args.rank)  # other augmentations on every rank

    optimizer: torch.optim.Optimizer
    if args.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4, fused=True)
    elif args.optimizer == "lars":
        optimizer = Lars(model, args.lr, momentum=0.9, weight_decay=1e-4)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0.05, fused=True)
    scaler = torch.amp.GradScaler(args.device, enabled=args.precision == "fp16")

    train_loader = build_loader(args, folder / "train", train=True)
    val_loader = build_loader(args, folder / "val", train=False)

    logged_at, logged_step = time.perf_counter(), 0
    for step, (epoch, (pixels, labels)) in enumerate(
        itertools.islice(batches(train_loader, args.epochs), args.steps), 1
    ):
        pixels = pixels.to(args.device, non_blocking=args.non_blocking)
        labels = labels.to(args.device, non_blocking=args.non_blocking)

        accumulating = step % args.accumulate > 0  # gradients stay on this rank, to be added to the next batch's
        quiet = accumulating and isinstance(model, DistributedDataParallel) and model.no_sync()
        with quiet or contextlib.nullcontext(), args.autocast:
            images = args.on_images(normalised(pixels, args), step, raw_model)
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        scaler.scale(loss / args.accumulate).backward()
        if not accumulating:
            args.after_backward(raw_model)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        args.after_step(
            step=step, model=raw_model, optimizer=optimizer, images=images, logits=logits, labels=labels, loss=loss
        )

        if args.validate_every and step % args.validate_every == 0:
            accuracy = validate(model, val_loader, args)
            if args.rank == 0:
                print(f"step {step}  validation accuracy {accuracy:.3f}", flush=True)
        if args.checkpoint_every and step % args.checkpoint_every == 0 and args.rank == 0:
            save(args.data / "checkpoint.pt", raw_model, optimizer, step)
        if step % args.log_every == 0 and args.rank == 0:
            value = loss.item()  # waits for the device, so not at every step
            now = time.perf_counter()
            rate = (step - logged_step) * args.batch_size * args.world / (now - logged_at)
            print(f"step {step}  epoch {epoch}  loss {value:.4f}  {rate:.0f} images/s", flush=True)
            logged_at, logged_step = now, step

    # Before its group: the other way round, PyTorch 2.13 and gloo's threads may wait for each other for ever.
    del model
    if args.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
