"""Segments land cover on patches cut from scenes; a manifest lists the patches. --fixed: the remedy."""

import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from clock import FIXED, Clock
from torch import nn
from torch.utils.data import DataLoader, Dataset

PATCH, SCENES, CLASSES, BATCH, STEPS = 64, 6, 5, 8, 80


def prepare(root, rows=18000):
    """Writes the scenes, and the manifest as the tiling tool leaves it."""
    rng = np.random.default_rng(0)
    for scene in range(SCENES):
        np.save(root / f"scene_{scene}.npy", rng.integers(0, 255, (4, 640, 640), dtype=np.uint8))
        np.save(root / f"label_{scene}.npy", rng.integers(0, CLASSES, (640, 640), dtype=np.uint8))
    scene = rng.integers(SCENES, size=rows)
    top, left = rng.integers(640 - PATCH, size=(2, rows))
    table = pd.DataFrame({"image": [f"scene_{s}.npy" for s in scene], "label": [f"label_{s}.npy" for s in scene]})
    table["top"], table["left"] = top, left
    table["split"] = np.where(rng.random(rows) < 0.9, "trn", "val")
    table["cloud"], table["lon"], table["lat"] = (
        rng.random(rows),
        rng.uniform(-90, -60, rows),
        rng.uniform(42, 60, rows),
    )
    table.to_csv(root / "manifest.csv", index=False)


class SegmentationDataset(Dataset):
    def __init__(self, root, split="trn"):
        self.root, self.split = root, split
        self.listed = self._listing()
        self.length = len(self.listed)
        self.arrays = {path.name: np.load(path, mmap_mode="r") for path in root.glob("*.npy")}

    def _listing(self):
        table = pd.read_csv(self.root / "manifest.csv")  # the cause
        return table[table["split"] == self.split]

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        listed = self.listed if FIXED else self._listing()  # the cause
        row = listed.iloc[index]
        place = np.s_[..., row["top"] : row["top"] + PATCH, row["left"] : row["left"] + PATCH]
        image = self.arrays[row["image"]][place].astype(np.float32) / 255
        label = self.arrays[row["label"]][place].astype(np.int64)
        return torch.from_numpy(image), torch.from_numpy(label)


def convs(inside, out):
    return nn.Sequential(
        nn.Conv2d(inside, out, 3, padding=1, bias=False),
        nn.BatchNorm2d(out),
        nn.ReLU(inplace=True),
        nn.Conv2d(out, out, 3, padding=1, bias=False),
        nn.BatchNorm2d(out),
        nn.ReLU(inplace=True),
    )


class SmallUNet(nn.Module):
    def __init__(self, width=10):
        super().__init__()
        self.down, self.bottom = convs(4, width), convs(width, 2 * width)
        self.pool, self.up = nn.MaxPool2d(2), nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.merge, self.head = convs(2 * width, width), nn.Conv2d(width, CLASSES, 1)

    def forward(self, x):
        skip = self.down(x)
        x = self.up(self.bottom(self.pool(skip)))
        return self.head(self.merge(torch.cat([skip, x], 1)))


def main():
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        order = torch.Generator().manual_seed(0)
        loader = DataLoader(
            SegmentationDataset(Path(name)), BATCH, shuffle=True, num_workers=1, generator=order, drop_last=True
        )
        model = SmallUNet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        clock = Clock(STEPS)
        for image, label in loader:
            loss = nn.functional.cross_entropy(model(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not clock.step():
                break
        print(f"loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
