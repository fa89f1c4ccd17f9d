"""All predictions so far are put together anew in every step. --fixed: they are kept in a list."""

import torch
from clock import FIXED, Clock

model = torch.nn.Sequential(torch.nn.Linear(64, 384), torch.nn.ReLU(), torch.nn.Linear(384, 96))
optimizer = torch.optim.Adam(model.parameters())
predictions, kept = torch.empty(0, 96), []
clock = Clock(300)
while True:
    x = torch.rand(512, 64)
    out = model(x)
    loss = (out - x.mean(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if FIXED:
        kept.append(out.detach())
    else:
        predictions = torch.cat([predictions, out.detach()])  # the cause
    if not clock.step():
        break
predictions = torch.cat(kept) if FIXED else predictions
print(f"spread of the predictions: {predictions.std():.4f}")
