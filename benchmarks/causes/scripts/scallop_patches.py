"""Finds scallops on a sea-floor mosaic from patches that are drawn where the survey saw many."""

import argparse
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Mosaic:
    def __init__(self, side=1000, scallops=900, seed=2):
        rng = np.random.default_rng(seed)
        self.image = rng.normal(0.4, 0.1, (side, side)).astype(np.float32)
        self.mask = np.zeros((side, side), np.float32)
        density = np.full((side, side), 1e-3)
        y, x = np.mgrid[-6:7, -6:7]
        disc = x**2 + y**2 <= 36
        for row, column in rng.integers(20, side - 20, (scallops, 2)):
            here = slice(row - 6, row + 7), slice(column - 6, column + 7)
            self.image[here] += 0.25 * disc
            self.mask[here] = np.maximum(self.mask[here], disc)
            density[row - 12 : row + 13, column - 12 : column + 13] += 1
        self.density = density


class DensitySampler:
    """Corners of patches, drawn in proportion to the density at their middle."""

    def __init__(self, density, patch, rng):
        half = patch // 2
        allowed = density[half:-half, half:-half]
        self.columns, self.patch, self.rng = allowed.shape[1], patch, rng
        self.probability = (allowed / allowed.sum()).ravel()

    def draw(self):
        place = self.rng.choice(self.probability.size, p=self.probability)  # the cause
        return divmod(int(place), self.columns)


class TabulatedSampler(DensitySampler):
    def __init__(self, density, patch, rng):
        super().__init__(density, patch, rng)
        self.cumulative = self.probability.cumsum()
        self.cumulative /= self.cumulative[-1]

    def draw(self):
        place = self.cumulative.searchsorted(self.rng.random(), side="right")
        return divmod(int(place), self.columns)


class PatchDataset(torch.utils.data.IterableDataset):
    def __init__(self, mosaic, sampler):
        self.mosaic, self.sampler = mosaic, sampler

    def __iter__(self):
        size = self.sampler.patch
        while True:
            row, column = self.sampler.draw()
            here = slice(row, row + size), slice(column, column + size)
            yield torch.from_numpy(self.mosaic.image[here])[None], torch.from_numpy(self.mosaic.mask[here])[None]


class Segmenter(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.fine = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU())
        self.coarse = nn.Sequential(
            nn.Conv2d(width, 2 * width, 3, 2, 1), nn.ReLU(), nn.Conv2d(2 * width, width, 3, 1, 1)
        )
        self.head = nn.Conv2d(2 * width, 1, 1)

    def forward(self, x):
        fine = self.fine(x)
        return self.head(torch.cat([fine, F.interpolate(self.coarse(fine), scale_factor=2.0)], 1))


def dice_and_cross_entropy(logits, mask):
    p = logits.sigmoid()
    dice = 1 - (2 * (p * mask).sum() + 1) / (p.sum() + mask.sum() + 1)
    return dice + F.binary_cross_entropy_with_logits(logits, mask)


def main(args):
    torch.manual_seed(0)
    mosaic = Mosaic()
    kind = TabulatedSampler if args.fixed else DensitySampler
    sampler = kind(mosaic.density, args.patch, np.random.default_rng(11))
    loader = iter(torch.utils.data.DataLoader(PatchDataset(mosaic, sampler), batch_size=args.batch))
    net = Segmenter()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    for step in range(args.steps):
        if step == 10:
            start = time.perf_counter()
        image, mask = next(loader)
        loss = dice_and_cross_entropy(net(image), mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{(time.perf_counter() - start) / (args.steps - 10) * 1e3:.2f} ms per step")
    print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--patch", type=int, default=64)
    main(parser.parse_args())
