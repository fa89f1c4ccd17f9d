"""Every sample is a row of a DataFrame, by iloc. --fixed: of an array."""

import numpy as np
import pandas as pd
import torch
from clock import FIXED, Clock
from torch.utils.data import DataLoader, Dataset


class Table(Dataset):
    def __init__(self):
        self.frame = pd.DataFrame(np.random.default_rng(0).random((20_000, 40)).astype(np.float32))
        self.rows = self.frame.to_numpy()

    def __len__(self):
        return 100 * len(self.rows)

    def __getitem__(self, index):
        if FIXED:
            return torch.from_numpy(self.rows[index % 20_000])
        return torch.tensor(self.frame.iloc[index % 20_000].to_numpy())  # the cause


model = torch.nn.Sequential(torch.nn.Linear(40, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters())
clock = Clock(3000)
for x in DataLoader(Table(), batch_size=128, shuffle=True):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
