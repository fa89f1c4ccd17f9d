"""A ResNet on JPEG files that one worker decodes, crops and flips. --fixed: 14 workers."""

import io

import numpy as np
import torch
import torch.nn.functional as F
from clock import Clock, options
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import models

args = options(steps=40)
if args.fixed and not args.tiny:
    args.steps = 300  # the first hundred use up what 14 workers have made before the first
on_gpu = args.device == "cuda"
batch, size = (4, 64) if args.tiny else (32, 224)


def files(count: int) -> list[bytes]:
    """Return pictures as the bytes of JPEG files."""
    drawn = np.random.default_rng(0)
    buffers = [io.BytesIO() for _ in range(count)]
    for buffer in buffers:
        pixels = drawn.integers(0, 255, (384, 512, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(buffer, "JPEG", quality=85)
    return [buffer.getvalue() for buffer in buffers]


class Pictures(Dataset[tuple[Tensor, int]]):
    def __init__(self) -> None:
        self.files = files(16)

    def __len__(self) -> int:
        return batch * (args.steps + 1)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        left, top = np.random.default_rng(number).integers(0, 100, 2)
        picture = Image.open(io.BytesIO(self.files[number % len(self.files)])).convert("RGB")
        picture = picture.resize((size, size), box=(left, top, left + 280, top + 280))
        pixels = torch.from_numpy(np.asarray(picture, np.float32).transpose(2, 0, 1) / 127.5 - 1)
        return pixels.flip(2) if number % 2 else pixels, number % 100


workers = (0 if args.tiny else 1) if not args.fixed else (2 if args.tiny else 14)
loader = DataLoader(Pictures(), batch, num_workers=workers, pin_memory=on_gpu)  # the cause
model = models.resnet18(num_classes=100).to(args.device, memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
clock = Clock(args, warm=120 if args.fixed else 15)
for images, labels in loader:  # the cause
    images = images.to(args.device, non_blocking=True, memory_format=torch.channels_last)
    labels = labels.to(args.device, non_blocking=True)
    with torch.autocast(args.device, torch.bfloat16):
        loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
