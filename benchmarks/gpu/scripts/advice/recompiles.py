"""A compiled network whose batches grow longer again and again. --fixed: all padded to one length."""

import torch
import torch.nn.functional as F
from clock import Clock, options
from torch import nn

args = options(steps=40)
width, batch = (16, 2) if args.tiny else (512, 16)
network = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)).to(args.device)
compiled = torch.compile(network, dynamic=False, backend="eager" if args.tiny else "inductor")
optimizer = torch.optim.AdamW(network.parameters(), fused=True)
clock = Clock(args, warm=8)
number = 0
while True:
    rows = torch.randn(batch, 64 + 16 * (number // 6), width, device=args.device)
    if args.fixed:
        rows = F.pad(rows, (0, 0, 0, 192 - rows.shape[1]))
    loss = compiled(rows).square().mean()  # the cause
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    number += 1
    if not clock.step():
        break
