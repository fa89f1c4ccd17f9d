"""Short-term wind forecast on a gridded reanalysis kept in a zarr store."""
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import zarr
from torch.utils.data import DataLoader, Dataset

HOURS, HEIGHT, WIDTH = 2976, 64, 64
HISTORY = 6
LEAD = 3
BATCH = 8
STEPS = 90
WARMUP = 5


def build_store(path):
    """Two variables (u10, v10), hourly, float32."""
    rng = np.random.default_rng(11)
    root = zarr.open_group(path, mode="w")
    lat = np.linspace(0, np.pi, HEIGHT)[:, None]
    lon = np.linspace(0, 2 * np.pi, WIDTH)[None, :]
    hours = np.arange(HOURS, dtype=np.float32)[:, None, None]
    for name, phase in (("u10", 0.0), ("v10", 1.3)):
        field = np.sin(2 * lon + 0.07 * hours + phase) * np.sin(lat) * 6
        field = field + 2 * np.cos(3 * lat - 0.21 * hours + phase)
        field = field + rng.normal(0, 0.4, field.shape)
        array = root.create_array(name, shape=field.shape, chunks=(744, 32, 32), dtype="float32")
        array[:] = np.round(field, 2).astype(np.float32)


class WindDataset(Dataset):
    """History of both components, target is the field LEAD hours later."""

    def __init__(self, path):
        root = zarr.open_group(path, mode="r")
        self.u10, self.v10 = root["u10"], root["v10"]
        self.scale = 6.0

    def __len__(self):
        return HOURS - HISTORY - LEAD

    def __getitem__(self, start):
        span = slice(start, start + HISTORY + LEAD)
        u = self.u10[span] / self.scale
        v = self.v10[span] / self.scale
        history = np.concatenate([u[:HISTORY], v[:HISTORY]])
        target = np.stack([u[-1], v[-1]])
        return torch.from_numpy(history), torch.from_numpy(target)


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(4, channels),
            nn.GELU(),
            nn.Conv2d(channels, channels, 3, padding=1, padding_mode="circular"),
        )

    def forward(self, x):
        return x + self.body(x)


class ForecastNet(nn.Module):
    def __init__(self, channels=32, depth=4):
        super().__init__()
        self.stem = nn.Conv2d(2 * HISTORY, channels, 4, stride=2, padding=1)
        self.blocks = nn.Sequential(*[Block(channels) for _ in range(depth)])
        self.head = nn.ConvTranspose2d(channels, 2, 4, stride=2, padding=1)

    def forward(self, history):
        return self.head(self.blocks(self.stem(history)))


def forever(loader):
    while True:
        yield from loader


def main():
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "reanalysis.zarr"
        build_store(store)
        loader = DataLoader(WindDataset(store), batch_size=BATCH, shuffle=True, drop_last=True)
        model = ForecastNet()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        criterion = nn.SmoothL1Loss()

        marks = []
        for step, (history, target) in enumerate(forever(loader)):
            if step == STEPS:
                break
            prediction = model(history)
            loss = criterion(prediction, target)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            scheduler.step()
            if step % 20 == 0:
                print(f"step {step:4d}  loss {loss.item():.4f}")
            marks.append(time.perf_counter())

    print(f"final loss {loss.item():.4f}")
    print(f"{1000 * np.diff(marks)[WARMUP:].mean():.1f} ms per step")


if __name__ == "__main__":
    main()
