"""All files of labels are read and checked before every training. --fixed: what was found is kept in one file."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from clock import FIXED, Clock
from torch.utils.data import DataLoader, TensorDataset

SIZE, BOXES = 40_000, 30
folder = Path(tempfile.mkdtemp())
boxes = np.random.default_rng(0).random((50, BOXES, 5)).round(4)
for n, rows in enumerate(boxes):
    (folder / f"{n}.txt").write_text("\n".join(" ".join(map(str, row)) for row in rows))
np.save(folder / "labels.npy", boxes[np.arange(SIZE) % 50].astype(np.float32))


def scanned(path):
    """Read the boxes of an image, one a line, and check them."""
    rows = [[float(number) for number in line.split()] for line in path.read_text().splitlines()]  # the cause
    if any(len(row) != 5 or not 0 <= min(row) <= max(row) <= 1 for row in rows):  # the cause
        raise ValueError(f"{path}: five numbers from 0 to 1 are expected")
    return rows


clock = Clock(150, warm=0)  # what is gained is the start: the time of the whole job, by its steps
if FIXED:
    labels = np.load(folder / "labels.npy")
else:
    labels = np.array([scanned(folder / f"{n % 50}.txt") for n in range(SIZE)], np.float32)  # the cause
data = TensorDataset(torch.rand(SIZE, 3, 16, 16), torch.from_numpy(labels).mean(1))
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 32, 3), torch.nn.ReLU(),
    torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(32, 5),
)  # fmt: skip
optimizer = torch.optim.Adam(model.parameters())
for x, y in DataLoader(data, batch_size=16, shuffle=True):
    loss = torch.nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
