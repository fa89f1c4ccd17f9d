"""A thread computes in Python beside the training. --fixed: it sleeps."""

import threading
import time

import torch
from clock import FIXED, Clock


def monitor():
    while True:
        if FIXED:
            time.sleep(0.1)
        else:
            sum(n * n for n in range(1000))  # the cause


threading.Thread(target=monitor, daemon=True).start()
model = torch.nn.Sequential(*(layer for _ in range(10) for layer in (torch.nn.Linear(64, 64), torch.nn.ReLU())))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.rand(16, 64)
clock = Clock(400, warm=5)
while True:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
