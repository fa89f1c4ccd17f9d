"""A denoiser trains on slices of scans that are stored in one compressed archive. --fixed: the remedy."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from clock import FIXED, Clock
from torch import nn
from torch.utils.data import DataLoader, Dataset


def write_archive(path, count=150, side=96):
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 4_000, (count, side // 8, side // 8))
    scans = np.kron(coarse, np.ones((1, 8, 8), int)) + rng.integers(0, 64, (count, side, side))
    np.savez_compressed(path, scans=scans.astype(np.uint16), subject=rng.integers(0, 20, count))


class ScanSlices(Dataset):
    def __init__(self, path, epoch_size=2_000):
        self.archive = np.load(path)
        self.count = len(self.archive["subject"])
        self.epoch_size = epoch_size
        self.scans = self.archive["scans"] if FIXED else None

    def __len__(self):
        return self.epoch_size

    def __getitem__(self, index):
        scans = self.scans if FIXED else self.archive["scans"]  # the cause
        scan = scans[index % self.count]
        scan = torch.from_numpy(scan.astype(np.float32))[None] / 4_096
        return scan + 0.1 * torch.randn_like(scan), scan


class Denoiser(nn.Module):
    """DnCNN, but shallow: it predicts the noise."""

    def __init__(self, width=16, depth=2):
        super().__init__()
        layers = [nn.Conv2d(1, width, 3, padding=1), nn.ReLU()]
        for _ in range(depth):
            layers += [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        self.body = nn.Sequential(*layers, nn.Conv2d(width, 1, 3, padding=1))

    def forward(self, x):
        return x - self.body(x)


def main():
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "scans.npz"
        write_archive(path)
        loader = DataLoader(ScanSlices(path), batch_size=4, shuffle=True)
        model = Denoiser()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        clock = Clock(60)
        for noisy, clean in loader:
            loss = nn.functional.l1_loss(model(noisy), clean)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not clock.step():
                break
        print(f"loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
