"""A TensorDataset that is read row by row and put together again. --fixed: a batch is taken with one index."""

import torch
from clock import FIXED, Clock
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

data = TensorDataset(torch.rand(200_000, 32), torch.rand(200_000, 1))
if FIXED:
    loader = DataLoader(data, sampler=BatchSampler(RandomSampler(data), 4096, False), batch_size=None)
else:
    loader = DataLoader(data, batch_size=4096, shuffle=True)  # the cause
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters())
clock = Clock(250)
more = True
while more:
    for x, y in loader:  # the cause
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        more = clock.step()
        if not more:
            break
