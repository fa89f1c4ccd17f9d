"""Samples that workers keep are lost with the workers after every epoch. --fixed: persistent workers."""

import torch
from clock import FIXED, Clock
from torch.utils.data import DataLoader, Dataset


class Cached(Dataset):
    def __init__(self):
        self.cache = {}

    def __len__(self):
        return 160

    def __getitem__(self, index):
        if index not in self.cache:
            self.cache[index] = torch.rand(220, 220).matrix_power(40)[0, :64]
        return self.cache[index]


model = torch.nn.Linear(64, 64)
optimizer = torch.optim.Adam(model.parameters())
loader = DataLoader(Cached(), batch_size=8, num_workers=1, persistent_workers=FIXED)  # the cause
clock = Clock(600, warm=40)
more = True
while more:
    for x in loader:  # the cause
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        more = clock.step()
        if not more:
            break
