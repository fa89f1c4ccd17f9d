"""A deep, narrow language model; AdamW goes through its parameters one by one. --fixed: fused=True."""

import torch
import torch.nn.functional as F
from clock import Clock, options
from networks import Language

args = options(steps=80)
width, layers, batch, length = (64, 4, 2, 16) if args.tiny else (192, 24, 16, 196)
model = Language(1000, width, layers).to(args.device)
tokens = torch.randint(1000, (batch, length), device=args.device)
ways = {"fused": True} if args.fixed else {"foreach": False}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **ways)  # the cause
clock = Clock(args)
while True:
    with torch.autocast(args.device, torch.bfloat16):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()  # the cause
    optimizer.zero_grad()
    if not clock.step():
        break
