"""A new iterator of the DataLoader, and so new workers, for every batch. --fixed: one iterator."""

import torch
from clock import FIXED, Clock
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.rand(4096, 64), torch.rand(4096, 1))
loader = DataLoader(data, batch_size=32, shuffle=True, num_workers=2)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
optimizer = torch.optim.Adam(model.parameters())
clock = Clock(200)


def batches():
    while True:
        yield from loader


kept = batches()
while True:
    x, y = next(kept) if FIXED else next(iter(loader))  # the cause
    loss = torch.nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
