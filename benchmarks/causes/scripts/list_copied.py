"""The data set is a list of objects, which each worker copies as it reads them. --fixed: an array."""

import numpy as np
import torch
from clock import FIXED, Clock
from torch.utils.data import DataLoader, Dataset


class Questions(Dataset):
    def __init__(self, count):
        self.rows = [f"question {n} and its answer, {n * 7919}" for n in range(count)]  # the cause
        if FIXED:
            self.rows = np.array(self.rows, dtype="S48")

    def __len__(self):
        return len(self.rows) // 2

    def __getitem__(self, index):
        pair = self.rows[index], self.rows[index + len(self)]
        letters = b"".join(pair) if FIXED else "".join(pair).encode()
        signal = torch.frombuffer(bytearray(letters[:64]), dtype=torch.uint8) / 256
        return torch.fft.fft(signal, n=4096).abs()[:384]


class Waves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lengths = torch.nn.Parameter(torch.rand(48))

    def forward(self, x):
        return (x[:, :, None] * self.lengths).sin().mean((1, 2))


model = Waves()
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
clock = Clock(600)
for x in DataLoader(Questions(3_000_000), batch_size=192, shuffle=True, num_workers=2):  # the cause
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
