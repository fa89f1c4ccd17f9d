"""A tensor is made of a list of arrays. --fixed: of one array."""

import numpy as np
import torch
from clock import FIXED, Clock
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset):
    series = np.random.default_rng(0).random((5000, 64)).astype(np.float32)

    def __len__(self):
        return 490_000

    def __getitem__(self, index):
        rows = [self.series[index % 4900 + n] for n in range(50)]
        return torch.from_numpy(np.stack(rows)) if FIXED else torch.tensor(rows)  # the cause


loader = DataLoader(Windows(), batch_size=16, shuffle=True)
model = torch.nn.GRU(64, 32, batch_first=True)
optimizer = torch.optim.Adam(model.parameters())
clock = Clock(800)
for x in loader:
    loss = model(x)[0].square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
