"""The rows of a batch are selected in a file of HDF5 by a list of their numbers. --fixed: all rows are read once."""

import tempfile
from pathlib import Path

import h5py
import numpy as np
import torch
from clock import FIXED, Clock
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

path = Path(tempfile.mkdtemp()) / "spikes.h5"
with h5py.File(path, "w") as file:
    file["spikes"] = np.random.default_rng(0).random((40_000, 32), np.float32)


class Spikes(Dataset):
    def __init__(self):
        self.spikes = h5py.File(path)["spikes"]
        if FIXED:
            self.spikes = self.spikes[:]

    def __len__(self):
        return len(self.spikes)

    def __getitem__(self, indices):
        return torch.from_numpy(self.spikes[sorted(indices)])  # the cause


data = Spikes()
sampler = BatchSampler(RandomSampler(data), batch_size=512, drop_last=True)
model = torch.nn.Sequential(
    torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 32)
)
optimizer = torch.optim.Adam(model.parameters())
clock = Clock(400)
more = True
while more:
    for x in DataLoader(data, sampler=sampler, batch_size=None):
        loss = torch.nn.functional.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        more = clock.step()
        if not more:
            break
