"""A ResNet-18 with a pyramid labels each pixel. --fixed: without deterministic algorithms."""

import random

import numpy as np
import torch
import torch.nn.functional as F
from clock import Clock, options
from torch import Tensor, nn
from torchvision.models import resnet18
from torchvision.models.feature_extraction import create_feature_extractor

args = options(steps=60)
classes, width, batch, size = (4, 16, 2, 64) if args.tiny else (21, 128, 16, 512)


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.benchmark = True
    torch.use_deterministic_algorithms(not args.fixed, warn_only=True)  # the cause


class Pyramid(nn.Module):
    """Features of four sizes, added up from the smallest to the largest, and labelled."""

    def __init__(self) -> None:
        super().__init__()
        stages = {f"layer{n}": f"layer{n}" for n in (1, 2, 3, 4)}
        self.body = create_feature_extractor(resnet18(), stages)
        self.sides = nn.ModuleList(nn.Conv2d(channels, width, 1) for channels in (64, 128, 256, 512))
        self.smooth = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.label = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        features = list(self.body(images).values())
        x = self.sides[3](features[3])
        for side, feature in zip(self.sides[2::-1], features[2::-1], strict=True):
            x = side(feature) + F.interpolate(x, scale_factor=2.0, mode="nearest")
        scores = self.label(self.smooth(x))
        return F.interpolate(scores, size=images.shape[2:], mode="bilinear", align_corners=False)  # the cause


seed_everything(42)  # the cause
model = Pyramid().to(args.device, memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, fused=True)
schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, args.steps, power=0.9)
images = torch.randn(batch, 3, size, size, device=args.device).to(memory_format=torch.channels_last)
labels = torch.randint(classes, (batch, size, size), device=args.device)
clock = Clock(args)
while True:
    with torch.autocast(args.device, torch.bfloat16):
        loss = F.cross_entropy(model(images), labels, ignore_index=255)
    optimizer.zero_grad()
    loss.backward()  # the cause
    optimizer.step()
    schedule.step()
    if not clock.step():
        break
