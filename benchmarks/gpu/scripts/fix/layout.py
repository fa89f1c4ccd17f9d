"""A residual network in bf16, on images that are on the GPU already; its convolutions are in NCHW."""

import argparse

import torch
import torch.nn.functional as F
from own_clock import Clock
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cuda")
parser.add_argument("--tiny", action="store_true")
args = parser.parse_args()
width, depth, batch, size, steps = (16, 2, 4, 32, 30) if args.tiny else (128, 12, 64, 112, 100)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm_one, self.norm_two = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.norm_two(self.two(F.relu(self.norm_one(self.one(x))))))


torch.manual_seed(0)
stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
model = nn.Sequential(stem, *(Block(width) for _ in range(depth)), nn.AdaptiveAvgPool2d(1), nn.Flatten())
model = nn.Sequential(model, nn.Linear(width, 100)).to(args.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
images = torch.randn(batch, 3, size, size, device=args.device)
labels = torch.randint(100, (batch,), device=args.device)
clock = Clock(steps)
for _ in range(steps):
    with torch.autocast(args.device, torch.bfloat16):
        loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    clock.step()
print("loss", loss.item())
