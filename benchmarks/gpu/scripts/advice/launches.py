"""A network of kernels so small that their launches are what it takes. --fixed: replayed as CUDA graphs."""

import torch
import torch.nn.functional as F
from clock import Clock, options
from torch import nn

args = options(steps=600)
width, layers, batch = (16, 4, 4) if args.tiny else (256, 16, 64)
parts = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(layers)]
model = nn.Sequential(*parts).to(args.device)
rows = torch.randn(batch, width, device=args.device)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
if args.fixed and args.device == "cuda":
    model = torch.cuda.make_graphed_callables(model, (rows,))
clock = Clock(args, warm=100)
while True:
    loss = F.mse_loss(model(rows), rows)  # the cause
    optimizer.zero_grad()
    loss.backward()  # the cause
    optimizer.step()
    if not clock.step():
        break
