"""Every sample gives a warning, which is always shown, for debugging. --fixed: only the first time."""

import warnings

import numpy as np
import torch
from clock import FIXED, Clock
from torch.utils.data import DataLoader, Dataset

if not FIXED:
    torch.set_warn_always(True)  # the cause
    warnings.simplefilter("always")  # the cause


class Stored(Dataset):
    def __init__(self):
        self.stored = [np.random.default_rng(n).random(64, np.float32).tobytes() for n in range(500)]

    def __len__(self):
        return 200_000

    def __getitem__(self, index):
        return torch.from_numpy(np.frombuffer(self.stored[index % 500], np.float32))  # the cause


model = torch.nn.Sequential(torch.nn.Linear(64, 384), torch.nn.ReLU(), torch.nn.Linear(384, 64))
optimizer = torch.optim.Adam(model.parameters())
clock = Clock(500)
for x in DataLoader(Stored(), batch_size=128, shuffle=True):
    loss = torch.nn.functional.mse_loss(model(x), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
