"""A histogram of every gradient in every step. --fixed: in every 50th."""

import numpy as np
import torch
from clock import FIXED, Clock

model = torch.nn.Sequential(*(layer for _ in range(8) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU())))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
logged = {}
x = torch.rand(32, 256)
clock = Clock(1600)
n = 0
while True:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not FIXED or n % 50 == 0:
        for name, parameter in model.named_parameters():
            logged[name] = np.histogram(parameter.grad.numpy(), bins=64)  # the cause
    n += 1
    if not clock.step():
        break
