"""A large vocabulary, with the loss written out in float32. --fixed: F.cross_entropy."""

import torch
import torch.nn.functional as F
from clock import Clock, options
from networks import Language
from torch import Tensor

args = options(steps=60)
vocabulary, width, layers, batch, length = (512, 64, 2, 2, 32) if args.tiny else (50304, 512, 4, 8, 1024)
model = Language(vocabulary, width, layers).to(args.device)
tokens = torch.randint(vocabulary, (batch, length), device=args.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def loss_of(scores: Tensor, wanted: Tensor) -> Tensor:
    if args.fixed:
        return F.cross_entropy(scores, wanted)
    scores = scores.float()  # the cause
    shifted = scores - scores.max(1, keepdim=True).values  # the cause
    logarithms = shifted - shifted.exp().sum(1, keepdim=True).log()  # the cause
    return -logarithms.gather(1, wanted.unsqueeze(1)).mean()  # the cause


clock = Clock(args)
while True:
    with torch.autocast(args.device, torch.bfloat16):
        loss = loss_of(model(tokens).flatten(0, 1), tokens.flatten())  # the cause
    optimizer.zero_grad()
    loss.backward()  # the cause
    optimizer.step()
    if not clock.step():
        break
