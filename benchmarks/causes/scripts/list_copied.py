"""The data set is a list of objects, which the worker copies as it reads them. --fixed: an array."""

import numpy as np
import torch
from clock import FIXED, Clock
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __init__(self, count):
        self.rows = np.arange(count) if FIXED else list(map(str, range(count)))  # the cause

    def __len__(self):
        return len(self.rows) // 2

    def __getitem__(self, index):
        digits = f"{self.rows[index]} {self.rows[index + len(self)]}".encode()
        return torch.fft.fft(torch.frombuffer(bytearray(digits), dtype=torch.uint8) / 256, n=4096).abs()[:384]


class Waves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lengths = torch.nn.Parameter(torch.rand(48))

    def forward(self, x):
        return (x[:, :, None] * self.lengths).sin().mean((1, 2))


model = Waves()
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
clock = Clock(600)
for x in DataLoader(Numbers(6_000_000), batch_size=192, shuffle=True, num_workers=1):  # the cause
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
