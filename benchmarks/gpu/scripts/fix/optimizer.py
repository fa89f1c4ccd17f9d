"""A deep, narrow network; its optimizer goes through the parameters one by one."""

import argparse

import torch
import torch.nn.functional as F
from own_clock import Clock
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cuda")
parser.add_argument("--tiny", action="store_true")
args = parser.parse_args()
width, layers, batch, steps = (32, 12, 16, 60) if args.tiny else (512, 120, 512, 120)

torch.manual_seed(0)
blocks = [m for _ in range(layers) for m in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())]
model = nn.Sequential(*blocks, nn.Linear(width, 10)).to(args.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
inputs = torch.randn(batch, width, device=args.device)
labels = torch.randint(10, (batch,), device=args.device)
clock = Clock(steps)
losses = []
for _ in range(steps):
    with torch.autocast(args.device, torch.bfloat16):
        loss = F.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
    clock.step()
print("loss", torch.stack(losses).mean().item())
