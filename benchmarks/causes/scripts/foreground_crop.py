"""Crops about a voxel of the organ; the organ's voxels are looked for in each sample. --fixed: once for each volume."""

import numpy as np
import torch
from clock import FIXED, Clock
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIZE, CROP, VOLUMES = 136, 16, 6


def scan(seed):
    """Make an image of noise with a bright ball, and the ball's mask."""
    rng = np.random.default_rng(seed)
    centre = rng.integers(30, SIZE - 30, 3)
    grid = np.stack(np.meshgrid(*[np.arange(SIZE)] * 3, indexing="ij"))
    mask = ((grid - centre[:, None, None, None]) ** 2).sum(0) < 20**2
    image = rng.random((SIZE, SIZE, SIZE), np.float32) + mask
    return image.astype(np.float32), mask.astype(np.uint8)


class CropAboutLabel:
    """Cut a cube, about a voxel of the foreground or of the background by turns of chance."""

    def __init__(self, size, share=0.5, seed=0):
        self.size, self.share = size, share
        self.rng = np.random.default_rng(seed)

    @staticmethod
    def indices(mask):
        flat = mask.ravel()
        return np.flatnonzero(flat > 0), np.flatnonzero(flat == 0)  # the cause

    def __call__(self, image, mask, found=None):
        foreground, background = found or self.indices(mask)  # the cause
        pool = foreground if self.rng.random() < self.share else background
        centre = np.unravel_index(pool[self.rng.integers(len(pool))], mask.shape)
        low = [int(np.clip(c - self.size // 2, 0, n - self.size)) for c, n in zip(centre, mask.shape, strict=True)]
        window = tuple(slice(at, at + self.size) for at in low)
        return image[window], mask[window]


class Organs(Dataset):
    def __init__(self, transform):
        self.scans = [scan(n) for n in range(VOLUMES)]
        self.found = [transform.indices(mask) for _, mask in self.scans] if FIXED else [None] * VOLUMES
        self.transform = transform

    def __len__(self):
        return 1000 * VOLUMES

    def __getitem__(self, index):
        number = index % VOLUMES
        image, mask = self.transform(*self.scans[number], self.found[number])
        if self.transform.rng.random() < 0.5:
            image, mask = image[::-1], mask[::-1]
        return torch.from_numpy(image.copy())[None], torch.from_numpy(mask.astype(np.float32))[None]


def block(inputs, outputs):
    return nn.Sequential(nn.Conv3d(inputs, outputs, 3, padding=1), nn.InstanceNorm3d(outputs), nn.LeakyReLU(0.1))


class Segmenter(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.top = block(1, width)
        self.bottom = nn.Sequential(nn.MaxPool3d(2), block(width, 2 * width), nn.Upsample(scale_factor=2))
        self.head = nn.Conv3d(3 * width, 1, 1)

    def forward(self, x):
        top = self.top(x)
        return self.head(torch.cat([top, self.bottom(top)], 1))


def dice_loss(logits, target):
    chance = logits.sigmoid()
    overlap = (chance * target).sum((1, 2, 3, 4))
    return 1 - ((2 * overlap + 1) / (chance.sum((1, 2, 3, 4)) + target.sum((1, 2, 3, 4)) + 1)).mean()


def train():
    loader = DataLoader(Organs(CropAboutLabel(CROP)), batch_size=4, shuffle=True)
    model = Segmenter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    clock = Clock(400)
    for image, mask in loader:
        loss = dice_loss(model(image), mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not clock.step():
            return


train()
