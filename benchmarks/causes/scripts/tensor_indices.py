"""A weighted sampler yields tensors, and every sample is indexed with one. --fixed: with numbers of Python's."""

import torch
from clock import FIXED, Clock
from torch.utils.data import DataLoader, Dataset, Sampler


class Balanced(Sampler):
    def __init__(self, labels):
        self.weights = 1 / torch.bincount(labels)[labels]

    def __len__(self):
        return len(self.weights)

    def __iter__(self):
        drawn = torch.multinomial(self.weights, len(self), replacement=True)
        if FIXED:
            drawn = drawn.tolist()
        return (index for index in drawn)  # the cause


class Clicks(Dataset):
    def __init__(self):
        self.features, self.prices = torch.rand(60_000, 48), torch.rand(60_000)
        self.labels = (torch.rand(60_000) > 0.9).long()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.features[index], self.prices[index], self.labels[index]  # the cause


data = Clicks()
model = torch.nn.Sequential(torch.nn.Linear(49, 96), torch.nn.ReLU(), torch.nn.Linear(96, 2))
optimizer = torch.optim.Adam(model.parameters())
clock = Clock(800)
more = True
while more:
    for features, prices, labels in DataLoader(data, batch_size=512, sampler=Balanced(data.labels)):
        loss = torch.nn.functional.cross_entropy(model(torch.cat([features, prices[:, None]], 1)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        more = clock.step()
        if not more:
            break
