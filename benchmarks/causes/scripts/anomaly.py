"""Anomaly detection is left on. --fixed: off."""

import torch
from clock import FIXED, Clock

torch.autograd.set_detect_anomaly(not FIXED)  # the cause
model = torch.nn.Sequential(*(layer for _ in range(12) for layer in (torch.nn.Linear(128, 128), torch.nn.Tanh())))
optimizer = torch.optim.Adam(model.parameters())
x = torch.rand(64, 128)
clock = Clock(1600)
while True:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
