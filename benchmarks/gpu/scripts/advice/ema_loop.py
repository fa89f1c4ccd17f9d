"""An average of the weights, kept parameter by parameter. --fixed: torch._foreach_lerp_, of all at once."""

import copy

import torch
import torch.nn.functional as F
from clock import Clock, options
from networks import Language

args = options(steps=80)
width, layers, batch, length = (64, 4, 2, 16) if args.tiny else (256, 24, 16, 128)
model = Language(1000, width, layers).to(args.device)
average = copy.deepcopy(model).requires_grad_(False)
tokens = torch.randint(1000, (batch, length), device=args.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


@torch.no_grad()
def follow() -> None:
    if args.fixed:
        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.001)
        return
    for kept, now in zip(average.parameters(), model.parameters(), strict=True):  # the cause
        kept.mul_(0.999).add_(now, alpha=0.001)  # the cause


clock = Clock(args)
while True:
    with torch.autocast(args.device, torch.bfloat16):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    follow()  # the cause
    if not clock.step():
        break
