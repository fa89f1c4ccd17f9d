"""A state that decays until it is denormal: products become slow. --fixed: set_flush_denormal(True)."""

import torch
from clock import FIXED, Clock

torch.set_flush_denormal(FIXED)
model = torch.nn.Linear(1024, 1024)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
state = torch.rand(256, 1024)
clock = Clock(700)
while True:
    state = 0.8 * state
    loss = model(state).square().mean()  # the cause
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
