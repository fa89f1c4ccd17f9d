"""An archive is opened for every sample. --fixed: once a process."""

import io
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import torch
from clock import FIXED, Clock
from torch.utils.data import DataLoader, Dataset

path = Path(tempfile.mkdtemp()) / "data.zip"
with zipfile.ZipFile(path, "w") as archive:
    for n in range(3000):
        buffer = io.BytesIO()
        np.save(buffer, np.full(256, n, np.float32))
        archive.writestr(f"{n}.npy", buffer.getvalue())


class Archive(Dataset):
    kept = None

    def __len__(self):
        return 3_000_000

    def __getitem__(self, index):
        if FIXED:
            self.kept = self.kept or zipfile.ZipFile(path)
            return torch.from_numpy(np.load(io.BytesIO(self.kept.read(f"{index % 3000}.npy"))))
        with zipfile.ZipFile(path) as archive:  # the cause
            return torch.from_numpy(np.load(io.BytesIO(archive.read(f"{index % 3000}.npy"))))


model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))
optimizer = torch.optim.Adam(model.parameters())
clock = Clock(120)
for x in DataLoader(Archive(), batch_size=8, shuffle=True, num_workers=1):
    loss = torch.nn.functional.mse_loss(model(x / 3000), x / 3000)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
