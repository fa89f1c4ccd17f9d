"""A language model whose RMS norm and activation are written out. --fixed: F.rms_norm and F.gelu."""

import torch
import torch.nn.functional as F
from clock import Clock, options
from torch import Tensor, nn

args = options(steps=60)
width, layers, batch, length = (64, 2, 2, 16) if args.tiny else (2048, 8, 8, 1024)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        if args.fixed:
            return F.rms_norm(x, (width,), self.weight.to(x.dtype), 1e-6)
        whole = x.float()
        scaled = whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + 1e-6)  # the cause
        return scaled.to(x.dtype) * self.weight.to(x.dtype)  # the cause


def gelu(x: Tensor) -> Tensor:
    if args.fixed:
        return F.gelu(x, approximate="tanh")
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x.pow(3))))  # the cause


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into, self.out = Norm(), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(gelu(self.into(self.norm(x))))


model = nn.Sequential(*(Block() for _ in range(layers)), Norm()).to(args.device, torch.bfloat16)
rows = torch.randn(batch, length, width, device=args.device, dtype=torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
clock = Clock(args)
while True:
    loss = F.mse_loss(model(rows), rows)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
