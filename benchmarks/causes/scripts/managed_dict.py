"""Labels stand in a dictionary of another process. --fixed: in one of this process."""

import multiprocessing

import torch
from clock import FIXED, Clock
from torch.utils.data import DataLoader, Dataset


class Labelled(Dataset):
    def __init__(self, labels):
        self.labels = labels

    def __len__(self):
        return 640_000

    def __getitem__(self, index):
        return torch.full((16,), float(self.labels[index % 1000]))  # the cause


if __name__ == "__main__":
    labels = {n: n % 10 for n in range(1000)}
    if not FIXED:
        labels = multiprocessing.Manager().dict(labels)
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.Adam(model.parameters())
    clock = Clock(2500)
    for x in DataLoader(Labelled(labels), batch_size=64, num_workers=1):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not clock.step():
            break
