"""Train a ResNet, VGG-19 or AlexNet on pictures with DistributedDataParallel, well, or with one of FAULTS planted.

    python workloads/ddp_resnet.py                                     one process
    torchrun --nproc-per-node 2 workloads/ddp_resnet.py                one process a GPU, or a CPU rank each
    torchrun --nproc-per-node 2 workloads/ddp_resnet.py --fault slow_rank

The pictures are made once, into PNG files under --data, and read back the way real ones are: a file a sample, decoded
and augmented by the loader's workers. Plain PyTorch: any profiler can be pointed at it, and none is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import gc
import os
import random
import shutil
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

# What can be planted, and the dlprof rule that must notice it. Each is one `if args.fault == ...` below.
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
HEALTHY = {
    "adamw": "--optimizer adamw",
    "checkpoints": "--checkpoint-every 50",
    "two_workers": "--workers 2",
}
# Options that a fault needs to cost more than a little on a CPU.
SHOWN_WITH = {
    "tiny_buckets": "--batch-size 16",  # a start of an exchange is little beside much to compute
}
# A step with it does less than any healthy one: none says how long it would take without.
OTHER_STEP = ("small_batch",)
NEEDS_GPU = ("blocking_copies", "copies_back", "item_every_step", "pageable", "small_batch", "tight_memory")
NEEDS_TWO_RANKS = ("blocking_allreduce", "slow_loader_one_rank", "slow_rank", "tiny_buckets")

Pixels = npt.NDArray[np.uint8]  # height × width × 3


# ---- the models --------------------------------------------------------------------------------------------------

# He et al., Deep Residual Learning for Image Recognition, 2015


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a way around them."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Give the block's features, as many channels as `width`."""
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x), inplace=True)


class Bottleneck(nn.Module):
    """A 3×3 convolution on few channels, between two 1×1 that shrink and widen. The stride sits on the 3×3."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(4 * width)
        self.shortcut = shortcut(inputs, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Give the block's features, four times as many channels as `width`."""
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = F.relu(self.norm2(self.conv2(y)), inplace=True)
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x), inplace=True)


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Give the way around a block: nothing where the shape stays, else a 1×1 projection."""
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    """Stages of residual blocks, each with half the resolution of the one before."""

    def __init__(
        self, block: type[BasicBlock | Bottleneck], widths: list[int], blocks: list[int], classes: int, small: bool
    ) -> None:
        super().__init__()
        layers: list[nn.Module]
        if small:  # 32×32 pictures cannot afford to lose resolution before the first stage
            layers = [nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU(inplace=True)]
        else:
            layers = [nn.Conv2d(3, widths[0], 7, 2, 3, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU(inplace=True)]
            layers += [nn.MaxPool2d(3, 2, 1)]
        channels = widths[0]
        for stage, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            for position in range(count):
                layers.append(block(channels, width, stride=2 if stage > 0 and position == 0 else 1))
                channels = width * block.expansion
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, classes)
        start(self)

    def forward(self, x: Tensor) -> Tensor:
        """Give the logits, batch × classes, of normalised pictures, batch × 3 × height × width."""
        logits: Tensor = self.classifier(self.features(x).mean((2, 3)))
        return logits


class Stack(nn.Module):
    """Convolutions one after the other, with max pooling between some, and three large linear layers behind them."""

    def __init__(self, convolutions: list[tuple[int, int, int] | int], grid: int, classes: int, small: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for convolution in convolutions:
            if isinstance(convolution, int):
                layers.append(nn.MaxPool2d(convolution, 2))
                continue
            width, kernel, stride = (convolution[0], 3, 1) if small else convolution
            layers += [nn.Conv2d(channels, width, kernel, stride, (kernel - 1) // 2), nn.ReLU(inplace=True)]
            channels = width
        self.features = nn.Sequential(*layers)
        # What is left of 32×32 pictures is hardly more than a point.
        self.grid, hidden = (1, 512) if small else (grid, 4096)
        self.classifier = nn.Sequential(
            nn.Linear(channels * self.grid**2, hidden),
            *(nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(hidden, hidden)),
            *(nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(hidden, classes)),
        )
        start(self)

    def forward(self, x: Tensor) -> Tensor:
        """Give the logits, batch × classes, of normalised pictures, batch × 3 × height × width."""
        logits: Tensor = self.classifier(F.adaptive_avg_pool2d(self.features(x), self.grid).flatten(1))
        return logits


def start(model: nn.Module) -> None:
    """Draw the convolutions' weights so that signals keep their size through many layers."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


WIDTHS = [64, 128, 256, 512]
RESNETS: dict[str, tuple[type[BasicBlock | Bottleneck], list[int], list[int]]] = {
    "resnet18": (BasicBlock, WIDTHS, [2, 2, 2, 2]),
    "resnet20": (BasicBlock, [16, 32, 64], [3, 3, 3]),  # the paper's smallest for 32×32: light enough for two CPU cores
    "resnet34": (BasicBlock, WIDTHS, [3, 4, 6, 3]),
    "resnet50": (Bottleneck, WIDTHS, [3, 4, 6, 3]),
    "resnet101": (Bottleneck, WIDTHS, [3, 4, 23, 3]),
    "resnet152": (Bottleneck, WIDTHS, [3, 8, 36, 3]),
}
# Width, kernel and stride of each convolution, and between them the window of each max pooling; then the grid of points
# that the linear layers see. Most of the weights are theirs: many bytes to exchange for little computing.
Layers = list[tuple[int, int, int] | int]
ALEXNET: Layers = [(64, 11, 4), 3, (192, 5, 1), 3, (384, 3, 1), (256, 3, 1), (256, 3, 1), 3]
VGG19: Layers = [*[(64, 3, 1)] * 2, 2, *[(128, 3, 1)] * 2, 2, *[(256, 3, 1)] * 4, 2]
VGG19 += [*[(512, 3, 1)] * 4, 2, *[(512, 3, 1)] * 4, 2]
STACKS = {
    "alexnet": (ALEXNET, 6),  # Krizhevsky, One Weird Trick for Parallelizing Convolutional Neural Networks, 2014
    "vgg19": (VGG19, 7),  # Simonyan and Zisserman, Very Deep Convolutional Networks for Image Recognition, 2014
}


def build_model(name: str, classes: int, small: bool) -> nn.Module:
    """Give a new model; `small` is the one for 32×32 pictures."""
    if name in STACKS:
        return Stack(*STACKS[name], classes=classes, small=small)
    return ResNet(*RESNETS[name], classes=classes, small=small)


# ---- the optimizer for large batches: You et al., Large Batch Training of Convolutional Networks, 2017 -----------


class Lars(torch.optim.Optimizer):
    """SGD with momentum, in which each layer's step is scaled to the size of its weights (LARS)."""

    def __init__(self, model: nn.Module, lr: float, momentum: float, weight_decay: float) -> None:
        layers = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]  # biases and norms step as with SGD
        groups = [
            {"params": layers, "trust": 0.001, "weight_decay": weight_decay},
            {"params": others, "trust": 0.0, "weight_decay": 0.0},
        ]
        super().__init__(groups, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override] # noqa: ARG002 - nobody passes one
        """Update every weight that has a gradient."""
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            if not weights:
                continue
            gradients = torch._foreach_add([p.grad for p in weights], weights, alpha=group["weight_decay"])
            if group["trust"]:
                sizes = torch.stack(torch._foreach_norm(weights))
                slopes = torch.stack(torch._foreach_norm([p.grad for p in weights])) + group["weight_decay"] * sizes
                trusted = torch.where((sizes > 0) & (slopes > 0), group["trust"] * sizes / slopes, 1.0)
                gradients = torch._foreach_mul(gradients, list(trusted.unbind()))
            velocities = [self.state[p].setdefault("velocity", torch.zeros_like(p)) for p in weights]
            torch._foreach_mul_(velocities, group["momentum"])
            torch._foreach_add_(velocities, gradients)
            torch._foreach_add_(weights, velocities, alpha=-group["lr"])


# ---- the pictures --------------------------------------------------------------------------------------------------

CLASSES = {"cifar": 10, "imagenet": 1000}
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
GRAIN = 4  # grey levels of noise: a 400×350 picture then takes some 190 kB, and 1.6 ms of a core to decode


def encode_png(pixels: Pixels) -> bytes:
    """Give an 8-bit RGB PNG, every row stored as its difference from the row above (PNG's filter 2)."""
    height, width, _ = pixels.shape
    rows = np.empty((height, 1 + 3 * width), np.uint8)
    rows[:, 0] = 2
    rows[0, 1:] = pixels[0].reshape(-1)
    rows[1:, 1:] = (pixels[1:] - pixels[:-1]).reshape(height - 1, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 1)), (b"IEND", b""))
    return PNG_SIGNATURE + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )


def decode_png(data: bytes) -> Pixels:
    """Give the pixels of a PNG as `encode_png` writes it; ValueError for any other, or one cut short or damaged."""
    if not data.startswith(PNG_SIGNATURE):
        raise ValueError("not a PNG file")
    chunks: dict[bytes, bytes] = {}
    at = len(PNG_SIGNATURE)
    while b"IEND" not in chunks:
        length, kind = struct.unpack_from(">I4s", data, at) if at + 12 <= len(data) else (0, b"")
        body = data[at + 8 : at + 8 + length]
        if data[at + 8 + length : at + 12 + length] != struct.pack(">I", zlib.crc32(kind + body)):
            raise ValueError("a PNG file that is cut short or damaged")
        chunks[kind] = chunks.get(kind, b"") + body
        at += 12 + length
    width, height, *layout = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, -1)
    if layout != [8, 2, 0, 0, 0] or rows.shape[1] != 1 + 3 * width or (rows[:, 0] != 2).any():
        raise ValueError("a PNG file that this script did not write")
    return np.add.accumulate(rows[:, 1:], axis=0, dtype=np.uint8).reshape(height, width, 3)


def draw_picture(dataset: str, label: int, rng: np.random.Generator) -> Pixels:
    """Draw one picture: the class's pattern of colours, blended with a random one, and grain on top."""
    height, width = (32, 32) if dataset == "cifar" else rng.integers((350, 300), (450, 400))
    pattern = np.random.default_rng([7, label]).random((4, 4, 3), np.float32)
    grid = 160 * pattern + 64 * rng.random((4, 4, 3), np.float32) + 12
    smooth = np.einsum("yi,ijc,xj->yxc", blend(int(height)), grid, blend(int(width)), optimize=True)
    pixels: Pixels = smooth.astype(np.uint8) + rng.integers(0, GRAIN, smooth.shape, np.uint8)
    return pixels


def blend(length: int) -> npt.NDArray[np.float32]:
    """Give the weights, length × 4, that stretch four values linearly over `length` pixels."""
    distance = np.abs(np.linspace(0, 3, length, dtype=np.float32)[:, None] - np.arange(4, dtype=np.float32))
    weights: npt.NDArray[np.float32] = np.maximum(0, 1 - distance)
    return weights


def make_pictures(data: Path, dataset: str, images: int) -> Path:
    """Give the folder with train/CLASS/*.png and val/CLASS/*.png (an eighth as many), made unless it is there.

    Every rank may call it: the first one that comes draws, and the others wait on the lock. The folder gets its name
    when all is in it, so that what an interrupted run left half done is drawn again.
    """
    folder, partial = data / f"{dataset}-{images}", data / f"{dataset}-{images}.partial"
    data.mkdir(parents=True, exist_ok=True)
    with (data / f"{dataset}-{images}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return folder
        print(f"drawing {images} pictures into {folder}", flush=True)
        shutil.rmtree(partial, ignore_errors=True)
        samples = [("train", index) for index in range(images)] + [("val", index) for index in range(-(-images // 8))]
        for split in ("train", "val"):
            for label in range(CLASSES[dataset]):
                (partial / split / f"{label:04d}").mkdir(parents=True)

        def draw(sample: tuple[str, int]) -> None:
            split, index = sample
            label = index % CLASSES[dataset]
            pixels = draw_picture(dataset, label, np.random.default_rng([split == "val", index]))
            (partial / split / f"{label:04d}" / f"{index:06d}.png").write_bytes(encode_png(pixels))

        with ThreadPoolExecutor() as pool:  # threads suffice: drawing and compressing run without the interpreter lock
            for _ in pool.map(draw, samples):
                pass
        partial.rename(folder)
    return folder


class Pictures(Dataset[tuple[Tensor, int]]):
    """The pictures of one split. A sample is its pixels (height × width × 3, uint8) and its class."""

    def __init__(
        self, folder: Path, dataset: str, train: bool, read_ms: float, denoise: bool, slow_ms: float = 0.0
    ) -> None:
        self.files = sorted(folder.glob("*/*.png"))
        self.dataset, self.train, self.read_ms, self.denoise = dataset, train, read_ms, denoise
        self.slow_ms = slow_ms

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        file = self.files[index]
        time.sleep(self.read_ms / 1e3)  # files this few come from memory; those of a real set come over a network
        worker = get_worker_info() if self.slow_ms else None
        if worker is not None and worker.id == 0:  # fault slow_worker
            time.sleep(self.slow_ms / 1e3)
        pixels = torch.from_numpy(decode_png(file.read_bytes()))
        if self.denoise:  # fault slow_decode
            pixels = smoothed(pixels)
        if self.dataset == "cifar":
            pixels = shifted(pixels) if self.train else pixels
        else:
            pixels = resized(random_box(pixels) if self.train else pixels, 224)
        if self.train and torch.rand(()) < 0.5:
            pixels = pixels.flip(1)
        return pixels, int(file.parent.name)


def shifted(pixels: Tensor, by: int = 4) -> Tensor:
    """Give the picture moved by up to `by` pixels each way, black where nothing is left."""
    height, width, _ = pixels.shape
    y, x = torch.randint(0, 2 * by + 1, (2,)).tolist()
    padded = pixels.new_zeros(height + 2 * by, width + 2 * by, 3)
    padded[by : by + height, by : by + width] = pixels
    return padded[y : y + height, x : x + width]


def random_box(pixels: Tensor) -> Tensor:
    """Give a box of the picture, 8 to 100 % of its area and between 3:4 and 4:3, as the paper's training does."""
    height, width, _ = pixels.shape
    u, v, y, x = torch.rand(4).tolist()
    area, ratio = height * width * (0.08 + 0.92 * u), (3 / 4) ** (1 - 2 * v)
    h, w = min(height, round((area / ratio) ** 0.5)), min(width, round((area * ratio) ** 0.5))
    top, left = int(y * (height - h + 1)), int(x * (width - w + 1))
    return pixels[top : top + h, left : left + w]


def resized(pixels: Tensor, size: int) -> Tensor:
    """Give the picture scaled to size × size."""
    planes = pixels.permute(2, 0, 1)[None]
    return F.interpolate(planes, (size, size), mode="bilinear", antialias=True)[0].permute(1, 2, 0)


def smoothed(pixels: Tensor, size: int = 320) -> Tensor:
    """Give the picture without its grain, by a blur at many times its resolution: much work for little gain."""
    height, width, _ = pixels.shape
    planes = pixels.permute(2, 0, 1)[None].float()
    large = F.interpolate(planes, (size, size), mode="bilinear")
    large = F.avg_pool2d(large, 5, 1, 2)
    return F.interpolate(large, (height, width), mode="area")[0].permute(1, 2, 0).byte()


# ---- one rank ------------------------------------------------------------------------------------------------------

# On two CPU cores a step then takes some 150 ms and the whole run half a minute; the GPU's batch is the largest that
# keeps activations of ResNet-50 in bf16 well below 40 GB.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "model": "resnet20",
        "dataset": "cifar",
        "images": 5120,
        "batch_size": 64,
        "epochs": 4,
        "workers": 1,
        "read_ms": 1.0,
        "precision": "fp32",
        "channels_last": True,  # a step of 160 ms, against 190
        "pin_memory": False,
        "bucket_mb": 0.5,  # in torch's 25 all gradients would fit: one all-reduce, with no backward left to hide it
    },
    "cuda": {
        "model": "resnet50",
        "dataset": "imagenet",
        "images": 16384,
        "batch_size": 256,
        "epochs": 4,
        "workers": 0,  # replaced by the cores that each rank of this machine has
        "read_ms": 0.0,
        "precision": "bf16",
        "channels_last": True,
        "pin_memory": True,
        "bucket_mb": 25.0,
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
    switch = argparse.BooleanOptionalAction
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=[*RESNETS, *STACKS])
    parser.add_argument("--dataset", choices=list(CLASSES))
    parser.add_argument("--data", type=Path, default=Path("data"), help="where the pictures are kept (default: data)")
    parser.add_argument("--images", type=int, help="how many to train on")
    parser.add_argument("--batch-size", type=int, help="pictures a rank and step")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--steps", type=int, help="stop after so many (default: all epochs')")
    parser.add_argument("--workers", type=int, help="loader processes a rank")
    parser.add_argument("--prefetch-factor", type=int, default=2, help="batches ahead, a worker (default: 2)")
    parser.add_argument("--persistent-workers", action=switch, default=True, help="keep them between epochs")
    parser.add_argument("--pin-memory", action=switch)
    parser.add_argument("--read-ms", type=float, help="what a read from storage waits, beside the local disk's time")
    parser.add_argument("--precision", choices=["fp32", "tf32", "bf16", "fp16"])
    parser.add_argument(
        "--compile",
        nargs="?",
        const="inductor",
        metavar="BACKEND",
        help="torch.compile the model (with inductor, which on a CPU needs a C++ compiler)",
    )
    parser.add_argument("--channels-last", action=switch)
    parser.add_argument(
        "--bucket-mb", type=float, help="gradients that DDP reduces in one go, MiB; compiled: 1 or more"
    )
    parser.add_argument("--find-unused", action="store_true", help="let DDP look for parameters without a gradient")
    parser.add_argument("--hook", choices=["fp16", "powersgd"], help="how DDP makes gradients smaller on their way")
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="batches an optimizer step (default: 1)")
    parser.add_argument("--optimizer", choices=["sgd", "adamw", "lars"], default="sgd")
    parser.add_argument(
        "--lr",
        type=float,
        help="learning rate (default: adamw 0.001; sgd 0.1 and lars 4 from 256 pictures a step on, less below; 0.01 for"
        " alexnet and vgg19 with sgd)",
    )
    parser.add_argument("--validate-every", type=int, default=0, metavar="N", help="steps (default: 0, never)")
    parser.add_argument("--checkpoint-every", type=int, default=0, metavar="N", help="steps (default: 0, never)")
    parser.add_argument("--log-every", type=int, default=20, metavar="N", help="steps (default: 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fault", choices=list(FAULTS), help="plant this mistake")
    args = parser.parse_args(argv)

    # torchrun says who we are; without it we are the only rank.
    args.rank, args.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    args.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            workers = name == "workers" and args.device == "cuda"
            setattr(args, name, min(16, max(1, len(os.sched_getaffinity(0)) // local_world)) if workers else value)
    if args.fault == "changing_shapes" and not args.compile:
        args.compile = "eager" if args.device == "cpu" else "inductor"
    if args.compile:
        args.bucket_mb = max(1.0, args.bucket_mb)  # DDP's first bucket is 1 MiB, and Dynamo refuses smaller ones
    if args.lr is None:
        share = min(1, args.batch_size * args.accumulate * args.world / 256)
        args.lr = {"sgd": 0.1 * share, "lars": 4 * share, "adamw": 0.001}[args.optimizer]
        if args.optimizer == "sgd" and args.model in STACKS:  # they have no norms: the papers' rate
            args.lr = 0.01
    if args.fault in NEEDS_GPU and args.device != "cuda":
        parser.error(f"--fault {args.fault} needs a GPU: on the CPU no batch is copied and no value waited for")
    if args.fault == "many_threads" and args.device != "cpu":
        parser.error("--fault many_threads needs --device cpu: a GPU's operators take one thread")
    if args.fault in NEEDS_TWO_RANKS and args.world < 2:
        parser.error(f"--fault {args.fault} needs two ranks: torchrun --nproc-per-node 2 {parser.prog} ...")
    if (args.find_unused or args.hook) and args.world < 2:
        parser.error(f"--find-unused and --hook need two ranks: torchrun --nproc-per-node 2 {parser.prog} ...")
    if args.accumulate < 1:
        parser.error(f"--accumulate {args.accumulate}: one batch at least")
    if args.device == "cpu" and args.precision in ("tf32", "fp16"):
        parser.error(f"--precision {args.precision} needs a GPU")
    if args.images < args.batch_size * args.world:
        parser.error(f"--images {args.images} is not one batch of {args.batch_size} for each of {args.world} ranks")
    return args


def build_loader(args: argparse.Namespace, folder: Path, train: bool) -> DataLoader[tuple[Tensor, int]]:
    """Give this rank's share of the pictures, in batches of uint8 pixels (batch × height × width × 3) and labels."""
    read_ms = args.read_ms
    if args.fault == "slow_loader_one_rank" and args.rank == 1:
        read_ms += 6.0  # as if this rank's machine had the slow disk
    # With this the slow one's turn comes every second, whatever their number.
    slow_ms = 1e3 * args.workers / args.batch_size if args.fault == "slow_worker" and train else 0.0
    pictures = Pictures(folder, args.dataset, train, read_ms, args.fault == "slow_decode", slow_ms)
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


def batches(loader: DataLoader[tuple[Tensor, int]], epochs: int) -> Iterator[tuple[int, Any]]:
    """Give every batch of every epoch with its epoch, each epoch in another order."""
    for epoch in range(epochs):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)  # else every epoch has the order of the first
        for batch in loader:
            yield epoch, batch


def python_metrics(logits: Tensor, labels: Tensor, resamples: int = 10_000) -> tuple[float, float]:
    """Give the bounds of the batch's top-3 accuracy, 95 % of bootstrap samples between them, in loops of Python."""
    hits = []
    for scores, label in zip(logits.tolist(), labels.tolist(), strict=True):
        best = sorted(range(len(scores)), key=scores.__getitem__)[-3:]
        hits.append(label in best)
    shares = sorted(sum(random.choices(hits, k=len(hits))) / len(hits) for _ in range(resamples))
    return shares[resamples // 40], shares[-resamples // 40]


@torch.no_grad()
def validate(model: nn.Module, loader: DataLoader[tuple[Tensor, int]], args: argparse.Namespace) -> float:
    """Give the share of the held-out pictures that the model gets right, over all ranks."""
    model.eval()
    counts = torch.zeros(2, device=args.device)
    for pixels, labels in loader:
        with autocast(args):
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
    """Have DDP's hook take a bucket when it is done with the one before.

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


def collect(kept: list[Any], objects: int = 1_000_000) -> None:
    """Look for garbage among so many objects, all of which live on."""
    if not kept:
        kept.extend([] for _ in range(objects))
    gc.collect()


def normalised(pixels: Tensor, args: argparse.Namespace) -> Tensor:
    """Give pixels (batch × height × width × 3, uint8) as the model wants them: batch × 3 × height × width, around 0.

    Done on the device: bytes are a quarter of what floats would cost on their way there.
    """
    planes = pixels.permute(0, 3, 1, 2)  # already channels last in memory
    planes = planes if args.channels_last else planes.contiguous()
    return planes.float().sub_(127.5).div_(32.0)


def autocast(args: argparse.Namespace) -> contextlib.AbstractContextManager[Any]:
    """Give the context in which the forward pass runs in 16 bits, or one that does nothing."""
    if args.precision in ("fp32", "tf32"):
        return contextlib.nullcontext()
    return torch.autocast(args.device, torch.bfloat16 if args.precision == "bf16" else torch.float16)


def no_sync(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Give the context whose forward passes leave their gradients on this rank, to be added to the next batch's."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext()


def main() -> None:
    args = parse()
    if args.fault == "many_threads":
        torch.set_num_threads(2 * (os.cpu_count() or 1))
    if args.fault == "no_workers":
        args.workers = 0
    if args.fault == "slow_worker":
        args.workers = max(2, args.workers)
    if args.fault == "blocking_copies":
        args.pin_memory = True
    if args.fault == "pageable":
        args.pin_memory = False
    if args.fault == "tiny_buckets":
        args.bucket_mb = 1e-6  # a byte: no gradient fits beside another
    if args.fault == "small_batch":
        args.batch_size = 8
    if args.fault == "validates_often":
        args.validate_every = 10
    folder = make_pictures(args.data, args.dataset, args.images)  # before the process group: nothing can time out

    if args.device == "cuda":
        torch.cuda.set_device(args.local_rank)
        torch.backends.cudnn.benchmark = True  # the shapes never change
        torch.backends.cudnn.allow_tf32 = args.precision == "tf32"  # on by default, and then fp32 is not fp32
        torch.backends.cuda.matmul.allow_tf32 = args.precision == "tf32"
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
    bare = model  # without the wrappers: its parameters are the same, their names in a checkpoint too
    if args.compile:
        sizes = False if args.fault == "changing_shapes" else None  # None: once a size has changed, for any
        model = torch.compile(model, backend=args.compile, dynamic=sizes)  # type: ignore[assignment] # still a module
        if args.fault == "changing_shapes":
            torch._dynamo.config.recompile_limit = 10_000  # as its warning suggests
    if args.world > 1 and args.fault != "blocking_allreduce":
        model = DistributedDataParallel(
            model,
            device_ids=[args.local_rank] if args.device == "cuda" else None,
            bucket_cap_mb=args.bucket_mb,
            gradient_as_bucket_view=True,
            find_unused_parameters=args.find_unused,
        )
        if args.hook == "fp16":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        if args.hook == "powersgd":  # after as many steps as the paper's authors found enough to settle
            state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=10)
            hook = powerSGD_hook.powerSGD_hook
            model.register_comm_hook(state, in_turn(hook) if args.device == "cpu" else hook)
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

    kept: list[Any] = []  # faults garbage and keeps_batches
    logged_at, logged_step = time.perf_counter(), 0
    for step, (epoch, (pixels, labels)) in enumerate(batches(train_loader, args.epochs), start=1):
        non_blocking = args.fault not in ("blocking_copies", "pageable")
        pixels = pixels.to(args.device, non_blocking=non_blocking)
        labels = labels.to(args.device, non_blocking=non_blocking)

        accumulating = step % args.accumulate > 0
        with no_sync(model) if accumulating else contextlib.nullcontext(), autocast(args):
            images = normalised(pixels, args)
            if args.fault == "changing_shapes":
                # Another height every third step, from 24 to 39 rows: on average as much to compute as without.
                images = torch.cat((images, images), 2)[:, :, : images.shape[2] - 8 + step // 3 % 16]
            if args.fault == "tight_memory" and step > 1:
                images = images[:, :, step * 7 % 64 :]
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
            if args.fault == "slow_rank" and args.rank == args.world - 1:
                bare(images)  # the same work once more, for nothing
        scaler.scale(loss / args.accumulate).backward()
        if args.fault == "blocking_allreduce" and not accumulating:
            for parameter in bare.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= args.world
        if not accumulating:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)

        if args.fault == "copies_back":
            images.cpu()
        if args.fault == "item_every_step":
            loss.item()
        if args.fault == "python_metrics":
            python_metrics(logits, labels)
        if args.fault == "garbage":
            collect(kept)
        if args.fault == "keeps_batches":
            kept.extend(images.clone() for _ in range(1 if args.device == "cuda" else 8))  # as if the CPU's were larger
        if args.fault == "tight_memory" and step == 10:
            total = torch.cuda.get_device_properties(args.device).total_memory
            torch.cuda.set_per_process_memory_fraction(1.02 * torch.cuda.max_memory_allocated() / total)
        if args.fault == "checkpoint_every_few" and step % 5 == 0 and args.rank == 0:
            for _ in range(1 if args.device == "cuda" else 40):  # as if the CPU's small model were so many times larger
                save(args.data / "checkpoint.pt", bare, optimizer, step)
        if args.validate_every and step % args.validate_every == 0:
            accuracy = validate(model, val_loader, args)
            if args.rank == 0:
                print(f"step {step}  validation accuracy {accuracy:.3f}", flush=True)
        if args.checkpoint_every and step % args.checkpoint_every == 0 and args.rank == 0:
            save(args.data / "checkpoint.pt", bare, optimizer, step)
        if step % args.log_every == 0 and args.rank == 0:
            value = loss.item()  # waits for the device, so not at every step
            now = time.perf_counter()
            rate = (step - logged_step) * args.batch_size * args.world / (now - logged_at)
            print(f"step {step}  epoch {epoch}  loss {value:.4f}  {rate:.0f} images/s", flush=True)
            logged_at, logged_step = now, step
        if step == args.steps:
            break

    # Before its group: the other way round, PyTorch 2.13 and gloo's threads may wait for each other for ever.
    del model
    if args.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
