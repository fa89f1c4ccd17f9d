"""Self-supervised: two views agree, and their codes fill the space. --fixed: log-determinant by Cholesky."""

import torch
import torch.nn.functional as F
from clock import Clock, options
from torch import Tensor, nn
from torchvision import models
from torchvision.models.resnet import BasicBlock

args = options(steps=80)
batch, size, codes, epsilon = (4, 8, 16, 0.2) if args.tiny else (512, 32, 512, 0.2)


class Encoder(nn.Module):
    """A ResNet-18 for small pictures, and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.body = models.ResNet(BasicBlock, [1 if args.tiny else 2] * 4)
        self.body.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.body.maxpool = nn.Identity()
        self.body.fc = nn.Identity()
        self.projection = nn.Sequential(
            nn.Linear(512, 1024, bias=False), nn.BatchNorm1d(1024), nn.ReLU(), nn.Linear(1024, codes)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(self.body(x))


def coding_rate(z: Tensor) -> Tensor:
    """Return half the log-determinant of 1 + codes / (batch epsilon) zᵀz."""
    scale = codes / (len(z) * epsilon)
    gram = torch.eye(codes, device=z.device) + scale * (z.T @ z)
    if args.fixed:
        return torch.linalg.cholesky(gram).diagonal().log().sum()
    return 0.5 * torch.linalg.eigvalsh(gram).log().sum()  # the cause


def views(images: Tensor) -> Tensor:
    """Return both views of each picture: flipped or not, brighter or darker, noisy."""
    both = torch.cat([images, images.flip(3)])
    light = torch.empty(len(both), 1, 1, 1, device=both.device).uniform_(0.6, 1.4)
    return both * light + 0.1 * torch.randn_like(both)


torch.backends.cudnn.benchmark = True
model = Encoder().to(args.device, memory_format=torch.channels_last)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
images = torch.randn(batch, 3, size, size, device=args.device).to(memory_format=torch.channels_last)
clock = Clock(args)
while True:
    with torch.autocast(args.device, torch.bfloat16, enabled=not args.tiny):
        found = model(views(images))
    first, second = F.normalize(found.float(), dim=1).chunk(2)
    agreement = F.cosine_similarity(first, second).mean()
    loss = -(coding_rate(first) + coding_rate(second)) / 2 - 100 * agreement  # the cause
    optimizer.zero_grad()
    loss.backward()  # the cause
    optimizer.step()
    if not clock.step():
        break
