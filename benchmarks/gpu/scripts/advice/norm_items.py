"""A language model; the norm of each gradient is read for the log. --fixed: one norm of all, which nobody reads."""

import torch
import torch.nn.functional as F
from clock import Clock, options
from networks import Language
from torch import Tensor

args = options(steps=80)
width, layers, batch, length = (64, 4, 2, 16) if args.tiny else (512, 16, 16, 256)
model = Language(1000, width, layers).to(args.device)
tokens = torch.randint(1000, (batch, length), device=args.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def norm_of(gradients: list[Tensor]) -> float:
    total = 0.0
    for gradient in gradients:  # the cause
        total += gradient.norm().item() ** 2  # the cause
    return total**0.5


clock = Clock(args)
while True:
    with torch.autocast(args.device, torch.bfloat16):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients) if args.fixed else norm_of(gradients)  # the cause
    optimizer.step()
    if not clock.step():
        break
