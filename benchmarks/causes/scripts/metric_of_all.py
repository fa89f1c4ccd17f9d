"""A metric is computed anew of all outputs so far, in every step. --fixed: it is updated."""

import torch
from clock import FIXED, Clock

model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
optimizer = torch.optim.Adam(model.parameters())
scores, labels = [], []
hits = 0
clock = Clock(600)
while True:
    x, y = torch.rand(512, 64), torch.rand(512) > 0.5
    out = model(x)[:, 0]
    loss = torch.nn.functional.binary_cross_entropy_with_logits(out, y.float())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if FIXED:
        hits += int(((out > 0) == y).sum())
    else:
        scores.append(out.detach())  # the cause
        labels.append(y)  # the cause
        order = torch.cat(scores).argsort()  # the cause
        rank = torch.cat(labels)[order].float().cumsum(0)  # the cause
    if not clock.step():
        break
