"""A chunk of many rows is unpacked for every row. --fixed: the last chunk is kept, and rows come in order."""

import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
from clock import FIXED, Clock
from torch.utils.data import DataLoader, Dataset

folder = Path(tempfile.mkdtemp())
for n in range(20):
    (folder / f"{n}.z").write_bytes(zlib.compress(np.full((500, 128), n, np.float32).tobytes()))


class Chunks(Dataset):
    kept = (-1, None)

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        chunk, row = divmod(index % 10_000, 500)
        if not FIXED or self.kept[0] != chunk:
            raw = zlib.decompress((folder / f"{chunk}.z").read_bytes())  # the cause
            self.kept = chunk, np.frombuffer(raw, np.float32).reshape(500, 128)
        return torch.tensor(self.kept[1][row])


model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128))
optimizer = torch.optim.Adam(model.parameters())
clock = Clock(1000)
for x in DataLoader(Chunks(), batch_size=32, shuffle=not FIXED):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
