"""Epochs of eight steps, each with workers of its own. --fixed: persistent_workers."""

import torch
import torch.nn.functional as F
from clock import Clock, options
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import models

args = options(steps=96)
on_gpu = args.device == "cuda"
batch, size, workers = (2, 32, 1) if args.tiny else (64, 128, 8)


class Pictures(Dataset[tuple[Tensor, int]]):
    def __init__(self) -> None:
        self.pixels = torch.randn(64, 3, size, size)

    def __len__(self) -> int:
        return batch * 8

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return self.pixels[number % 64] * 0.9, number % 100


loader = DataLoader(  # the cause
    Pictures(), batch, shuffle=True, num_workers=workers, pin_memory=on_gpu, persistent_workers=args.fixed
)
model = models.resnet18(num_classes=100).to(args.device, memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
clock = Clock(args, warm=16)
goes_on = True
while goes_on:
    for images, labels in loader:  # the cause
        images = images.to(args.device, non_blocking=True, memory_format=torch.channels_last)
        labels = labels.to(args.device, non_blocking=True)
        with torch.autocast(args.device, torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        goes_on = clock.step()
        if not goes_on:
            break
