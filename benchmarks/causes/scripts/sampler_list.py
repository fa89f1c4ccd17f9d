"""A sampler makes a list of all indices, of which few are used. --fixed: indices are drawn as they are needed."""

import random

import torch
from clock import FIXED, Clock
from torch.utils.data import DataLoader, Dataset, Sampler

SIZE = 10_000_000


class Shuffled(Sampler):
    def __len__(self):
        return SIZE

    def __iter__(self):
        if FIXED:
            return iter(lambda: random.randrange(SIZE), None)
        order = list(range(SIZE))  # the cause
        random.shuffle(order)  # the cause
        return iter(order)


class Rows(Dataset):
    rows = torch.rand(1000, 64)

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return self.rows[index % 1000]


loader = DataLoader(Rows(), batch_size=64, sampler=Shuffled())
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64))
optimizer = torch.optim.Adam(model.parameters())
clock = Clock(400, warm=0)  # what is gained is the start
for x in loader:
    loss = torch.nn.functional.mse_loss(model(x), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
