"""The batches of an epoch are counted by loading all of them. --fixed: by the length of the loader."""

import torch
from clock import FIXED, Clock
from torch.utils.data import DataLoader, Dataset


class Neighbours(Dataset):
    """For each node, the mean of what its neighbours, and their neighbours, have."""

    def __init__(self):
        numbers = torch.Generator().manual_seed(0)
        self.features = torch.rand(4000, 32, generator=numbers)
        self.edges = torch.randint(4000, (4000, 12), generator=numbers)

    def __len__(self):
        return 640

    def __getitem__(self, index):
        first = self.edges[index]
        second = self.edges[first].reshape(-1).unique()
        means = self.features[first].mean(0), self.features[second].mean(0)
        return torch.cat([self.features[index], *means])


loader = DataLoader(Neighbours(), batch_size=32)
model = torch.nn.Sequential(
    torch.nn.Linear(96, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1)
)
optimizer = torch.optim.Adam(model.parameters())
clock = Clock(400)
more = True
while more:
    batches = len(loader) if FIXED else len(list(loader))  # the cause
    for batch, x in enumerate(loader):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 - batch / batches)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        more = clock.step()
        if not more:
            break
