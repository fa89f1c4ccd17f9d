"""The loss is no number from the 50th step on, and training goes on. --fixed: a learning rate that holds."""

import torch
from clock import FIXED, Clock

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 if FIXED else 1e4)
x = torch.rand(32, 64)
clock = Clock(200)
while True:
    loss = (model(x) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # the cause
    if not clock.step():
        break
