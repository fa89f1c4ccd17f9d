"""A language model whose autograd looks for anomalies, left on after debugging. --fixed: off."""

import torch
import torch.nn.functional as F
from clock import Clock, options
from networks import Language

args = options(steps=80)
width, layers, batch, length = (64, 4, 2, 16) if args.tiny else (512, 12, 16, 256)
model = Language(1000, width, layers).to(args.device)
tokens = torch.randint(1000, (batch, length), device=args.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
torch.autograd.set_detect_anomaly(not args.fixed)  # the cause
clock = Clock(args)
while True:
    with torch.autocast(args.device, torch.bfloat16):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()  # the cause
    optimizer.step()
    if not clock.step():
        break
