"""Phases timed with torch.cuda.synchronize(), which was forgotten in the script. --fixed: without it."""

import time
from collections import Counter

import torch
import torch.nn.functional as F
from clock import Clock, options
from networks import Language

args = options(steps=80)
width, layers, batch, length = (64, 2, 2, 16) if args.tiny else (384, 12, 96, 196)
model = Language(1000, width, layers).to(args.device)
tokens = torch.randint(1000, (batch, length), device=args.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
spent: Counter[str] = Counter()


def lap(phase: str, since: float) -> float:
    if args.device == "cuda" and not args.fixed:
        torch.cuda.synchronize()  # the cause
    spent[phase] += round(1e6 * (time.perf_counter() - since))
    return time.perf_counter()


clock = Clock(args)
while True:
    began = time.perf_counter()
    with torch.autocast(args.device, torch.bfloat16):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    began = lap("forward", began)
    optimizer.zero_grad()
    loss.backward()
    began = lap("backward", began)
    optimizer.step()
    began = lap("optimizer", began)
    seen = sum(n * n % 7 for n in range(20 if args.tiny else 60000))  # what a script does besides
    if not clock.step():
        break
