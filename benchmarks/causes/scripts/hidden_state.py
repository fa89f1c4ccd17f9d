"""A hidden state that is not detached: every backward pass goes through all steps so far. --fixed: detached."""

import torch
from clock import FIXED, Clock

cell = torch.nn.GRUCell(64, 64)
x = torch.rand(32, 64)
hidden = torch.zeros(32, 64)
clock = Clock(400)
while True:
    hidden = cell(x, hidden)  # the cause
    loss = hidden.square().mean()
    cell.zero_grad()
    loss.backward(retain_graph=True)  # the cause
    if FIXED:
        hidden = hidden.detach()
    if not clock.step():
        break
