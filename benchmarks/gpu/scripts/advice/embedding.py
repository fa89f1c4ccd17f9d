"""A recommender whose table gets a gradient as large as itself. --fixed: sparse=True and SparseAdam."""

import torch
import torch.nn.functional as F
from clock import Clock, options
from torch import nn

args = options(steps=100)
count, width, batch = (1000, 16, 8) if args.tiny else (4_000_000, 64, 8192)
table = nn.EmbeddingBag(count, width, mode="sum", sparse=args.fixed).to(args.device)  # the cause
layers = nn.Sequential(nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
layers.to(args.device)
items = torch.randint(count, (batch, 20), device=args.device)
labels = torch.rand(batch, 1, device=args.device).round()
optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(layers.parameters(), fused=True)]
if args.fixed:
    optimizers.append(torch.optim.SparseAdam(list(table.parameters())))
else:
    optimizers.append(torch.optim.Adam(table.parameters(), fused=True))  # the cause
clock = Clock(args)
while True:
    loss = F.binary_cross_entropy_with_logits(layers(table(items)), labels)  # the cause
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()  # the cause
    for optimizer in optimizers:
        optimizer.step()  # the cause
    if not clock.step():
        break
