"""An average of the weights, by a loop over the state dict. --fixed: in every tenth step."""

import copy

import torch
from clock import FIXED, Clock

model = torch.nn.Sequential(*(layer for _ in range(60) for layer in (torch.nn.Linear(48, 48), torch.nn.LayerNorm(48))))
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.rand(16, 48)


@torch.no_grad()
def follow():
    now = model.state_dict()  # the cause
    for name, kept in average.state_dict().items():  # the cause
        if kept.dtype.is_floating_point:
            kept *= 0.999  # the cause
            kept += 0.001 * now[name].detach()  # the cause


clock = Clock(1000)
while True:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not FIXED or clock.done % 10 == 0:
        follow()  # the cause
    if not clock.step():
        break
