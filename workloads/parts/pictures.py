"""Pictures to classify: PNG files that are drawn once and read with Pillow, or patterns that are made up in memory."""

from __future__ import annotations

import fcntl
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor
from torch.utils.data import Dataset

CLASSES = {"cifar": 10, "imagenet": 1000}
Pixels = npt.NDArray[np.uint8]  # height × width × 3


def pillow() -> ModuleType:
    """Return PIL.Image; where it is missing, exit with how to install it."""
    try:
        from PIL import Image
    except ImportError:
        sys.exit("the pictures need Pillow: pip install pillow")  # or dlprof's extra: workloads
    return Image


# ---- drawn once ----------------------------------------------------------------------------------------------------


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


# ---- read and augmented --------------------------------------------------------------------------------------------


class Pictures(Dataset[tuple[Tensor, int]]):
    """The pictures of one split. A sample is its pixels (height × width × 3, uint8) and its class.

    Each read waits `read_ms` more than the disk: files this few come from memory, those of a real set over a network.
    """

    def __init__(
        self, folder: Path, dataset: str, train: bool, read_ms: float, on_read: Callable[[Tensor], Tensor]
    ) -> None:
        self.files = sorted(folder.glob("*/*.png"))
        self.dataset, self.train, self.read_ms, self.on_read = dataset, train, read_ms, on_read

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self.read_ms / 1e3)
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


def smooth(pixels: Tensor) -> Tensor:
    """Return the picture without its grain, by a blur at many times its resolution: much work for little gain."""
    planes = pixels.permute(2, 0, 1)[None].float()
    large = F.avg_pool2d(F.interpolate(planes, (320, 320), mode="bilinear"), 5, 1, 2)
    return F.interpolate(large, planes.shape[2:], mode="area")[0].permute(1, 2, 0).byte()


def normalised(pixels: Tensor, channels_last: bool) -> Tensor:
    """Return pixels (batch × height × width × 3, uint8) as a model wants them: batch × 3 × height × width, around 0.

    Done on the device: bytes are a quarter of what floats would cost on their way there.
    """
    planes = pixels.permute(0, 3, 1, 2)  # already channels last in memory
    return (planes if channels_last else planes.contiguous()).float().sub_(127.5).div_(32.0)


# ---- made up in memory ---------------------------------------------------------------------------------------------


class Patterns(Dataset[tuple[Tensor, int]]):
    """Made-up pictures, 3 × size × size floats: the pattern of one of ten classes, and as much noise."""

    classes = 10

    def __init__(self, count: int, size: int, seed: int, read_ms: float = 0.0) -> None:
        self.count, self.size, self.seed, self.read_ms = count, size, seed, read_ms
        coarse = torch.randn(self.classes, 3, 4, 4, generator=torch.Generator().manual_seed(0))
        self.patterns = F.interpolate(coarse, size=(size, size), mode="bilinear")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self.read_ms / 1e3)
        generator = torch.Generator().manual_seed(self.seed * self.count + index)
        noise = torch.randn(3, self.size, self.size, generator=generator)
        return self.patterns[index % self.classes] + noise, index % self.classes
