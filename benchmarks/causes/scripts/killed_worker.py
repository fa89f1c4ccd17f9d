"""A worker is killed, and with it the job. --fixed: it is not."""

import os
import signal

import torch
from clock import FIXED, Clock
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 6400

    def __getitem__(self, index):
        if index == 2000 and not FIXED:
            os.kill(os.getpid(), signal.SIGKILL)  # the cause
        return torch.full((64,), float(index))


model = torch.nn.Linear(64, 64)
optimizer = torch.optim.Adam(model.parameters())
clock = Clock(190)
for x in DataLoader(Rows(), batch_size=32, num_workers=2):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
