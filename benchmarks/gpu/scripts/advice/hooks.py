"""Each gradient's range and mean are logged by a hook, in every step. --fixed: in every 50th."""

import torch
import torch.nn.functional as F
from clock import Clock, options
from networks import Language
from torch import Tensor

args = options(steps=70)
width, layers, batch, length = (64, 4, 2, 16) if args.tiny else (512, 12, 16, 256)
model = Language(1000, width, layers).to(args.device)
tokens = torch.randint(1000, (batch, length), device=args.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
logged: dict[str, tuple[float, float, float]] = {}
number = 0


def watch(name: str, gradient: Tensor) -> None:
    if args.fixed and number % 50:
        return
    logged[name] = (gradient.min().item(), gradient.max().item(), gradient.mean().item())  # the cause


for name, parameter in model.named_parameters():
    parameter.register_hook(lambda gradient, name=name: watch(name, gradient))  # the cause
clock = Clock(args)
while True:
    with torch.autocast(args.device, torch.bfloat16):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()  # the cause
    optimizer.step()
    number += 1
    if not clock.step():
        break
