"""The process may use one core of all, and so may its workers. --fixed: all."""

import os

import torch
from clock import FIXED, Clock
from torch.utils.data import DataLoader, Dataset

if not FIXED:
    os.sched_setaffinity(0, {0})  # the cause


class Noise(Dataset):
    def __len__(self):
        return 64_000

    def __getitem__(self, index):
        x = torch.rand(3, 96, 96)
        return (x - x.mean()) / x.std()


model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, 2), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 3, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
clock = Clock(600)
for x in DataLoader(Noise(), batch_size=16, num_workers=1):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
