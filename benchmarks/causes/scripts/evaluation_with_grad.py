"""Evaluation every few steps keeps what a backward pass would need. --fixed: under no_grad."""

import torch
from clock import FIXED, Clock

model = torch.nn.Sequential(*(layer for _ in range(10) for layer in (torch.nn.Linear(256, 256), torch.nn.Tanh())))
optimizer = torch.optim.Adam(model.parameters())
x, held_out = torch.rand(64, 256), torch.rand(4096, 256)
clock = Clock(120)


def evaluate():
    with torch.set_grad_enabled(not FIXED):
        return float(model(held_out).square().mean())  # the cause


n = 0
while True:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    n += 1
    if n % 4 == 0:
        evaluate()  # the cause
    if not clock.step():
        break
