"""Segments glands in small tissue tiles with a U-shaped network and a Dice loss."""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIZE, TILES = 48, 1200


def write_tiles(root, count):
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:SIZE, :SIZE]
    left, top = rng.uniform(12, SIZE - 12, (2, count, 1, 1))
    mask = (x - left) ** 2 + (y - top) ** 2 < rng.uniform(5, 12, (count, 1, 1)) ** 2
    tissue = rng.integers(140, 220, (count, SIZE, SIZE, 3), dtype=np.uint8)
    tissue[mask] -= np.array([60, 90, 40], dtype=np.uint8)
    np.save(root / "tiles.npy", tissue)
    np.save(root / "masks.npy", mask)


class Tiles(Dataset):
    def __init__(self, root, numbers, augment):
        self.tiles, self.masks = (np.load(root / f"{name}.npy", mmap_mode="r") for name in ("tiles", "masks"))
        self.numbers, self.augment = numbers, augment

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        number = self.numbers[index]
        tile = torch.from_numpy(self.tiles[number].astype(np.float32)).permute(2, 0, 1) / 255
        mask = torch.from_numpy(self.masks[number].astype(np.float32)).unsqueeze(0)
        flip = self.augment and torch.rand(()) < 0.5
        return (tile.flip(-1), mask.flip(-1)) if flip else (tile, mask)


class DoubleConv(nn.Sequential):
    def __init__(self, inside, out):
        layers = []
        for width in (inside, out):
            layers += [nn.Conv2d(width, out, 3, padding=1, bias=False), nn.GroupNorm(4, out), nn.SiLU()]
        super().__init__(*layers)


class GlandNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.enter, self.middle = DoubleConv(3, width), DoubleConv(width, 2 * width)
        self.bottom = DoubleConv(2 * width, 4 * width)
        self.up2, self.up1 = (nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in (2 * width, width))
        self.merge2, self.merge1 = DoubleConv(4 * width, 2 * width), DoubleConv(2 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        top = self.enter(x)
        middle = self.middle(F.max_pool2d(top, 2))
        low = self.up2(self.bottom(F.max_pool2d(middle, 2)))
        low = self.up1(self.merge2(torch.cat([low, middle], 1)))
        return self.head(self.merge1(torch.cat([low, top], 1)))


def dice_loss(logits, mask, smooth=1.0):
    share = logits.sigmoid()
    overlap, total = (share * mask).sum((1, 2, 3)), (share + mask).sum((1, 2, 3))
    return 1 - ((2 * overlap + smooth) / (total + smooth)).mean()


@torch.no_grad()
def overlap_over_union(model, loader):
    found, true = map(torch.cat, zip(*[(model(tile) > 0, mask > 0) for tile, mask in loader]))
    return ((found & true).sum() / (found | true).sum()).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_tiles(root, TILES)
        cut = TILES * 9 // 10
        loader = DataLoader(Tiles(root, range(cut), True), 16, shuffle=True, drop_last=True)
        validation = DataLoader(Tiles(root, range(cut, TILES), False), 40)
        model = GlandNet()
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        seconds = step = 0
        for epoch in range(args.epochs):
            began = time.perf_counter()
            for tile, mask in loader:
                logits = model(tile)
                loss = F.binary_cross_entropy_with_logits(logits, mask) + dice_loss(logits, mask)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            step, seconds = step + len(loader), seconds + time.perf_counter() - began
            print(f"epoch {epoch} loss {loss.item():.5f} {overlap_over_union(model, validation):.3f}", flush=True)
            torch.save({"model": model.state_dict(), "epoch": epoch}, root / "last.pt")
        print(f"{seconds / step * 1e3:.2f} ms per step")


if __name__ == "__main__":
    main()
