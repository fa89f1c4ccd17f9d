"""The loss is computed for each time step of each sequence by itself, and summed. --fixed: in one call."""

import torch
from clock import FIXED, Clock

recurrent, head = torch.nn.GRU(48, 96, batch_first=True), torch.nn.Linear(96, 200)
optimizer = torch.optim.Adam([*recurrent.parameters(), *head.parameters()])
clock = Clock(200)
while True:
    x, y = torch.rand(24, 16, 48), torch.randint(200, (24, 16))
    out = head(recurrent(x)[0])
    if FIXED:
        loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())
    else:
        loss = 0
        for outputs, targets in zip(out, y, strict=True):
            for output, target in zip(outputs, targets, strict=True):
                loss = loss + torch.nn.functional.cross_entropy(output, target) / y.numel()  # the cause
    optimizer.zero_grad()
    loss.backward()  # the cause
    optimizer.step()
    if not clock.step():
        break
