"""Tensors are written into messages which the log then drops. --fixed: the log formats them, where it needs them."""

import logging

import torch
from clock import FIXED, Clock

log = logging.getLogger("training")
log.setLevel(logging.INFO)
model = torch.nn.Sequential(
    *(layer for _ in range(6) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU())), torch.nn.Linear(256, 10)
)
optimizer = torch.optim.Adam(model.parameters())
clock = Clock(500)
while True:
    x, y = torch.rand(64, 256), torch.randint(10, (64,))
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    for name, parameter in model.named_parameters():
        if FIXED:
            log.debug("%s: %s", name, parameter.grad)
        else:
            log.debug(f"{name}: {parameter.grad}")  # the cause
    optimizer.step()
    if not clock.step():
        break
