"""The whole of the training runs under PyTorch's profiler. --fixed: without."""

import torch
from clock import FIXED, Clock

layers = torch.nn.ModuleList(torch.nn.Linear(48, 48) for _ in range(30))
optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3)


def train():
    clock = Clock(200)
    while True:
        x = torch.rand(32, 48)
        out = x
        for layer in layers:
            out = out + layer(out).tanh() / 8
        loss = (out - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not clock.step():
            break


with torch.autograd.profiler.profile(enabled=not FIXED):  # the cause
    train()
