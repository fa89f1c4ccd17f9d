"""A head that is no longer trained has gradients of 0; RMSprop's state of it becomes subnormal. --fixed: 0."""

import torch
from clock import FIXED, Clock

if FIXED:
    torch.set_flush_denormal(True)
body, head = torch.nn.Linear(256, 256), torch.nn.Linear(256, 1024)
optimizer = torch.optim.RMSprop([*body.parameters(), *head.parameters()], lr=1e-3, alpha=0.8)  # the cause
clock = Clock(1200)
while True:
    out = body(torch.rand(128, 256))
    loss = out.square().mean()
    if clock.done < 40:
        loss = loss + head(out).square().mean()
    optimizer.zero_grad(set_to_none=False)  # the cause
    loss.backward()
    optimizer.step()  # the cause
    if not clock.step():
        break
