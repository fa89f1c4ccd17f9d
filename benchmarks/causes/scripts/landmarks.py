"""A network regresses heatmaps of 68 facial landmarks. --fixed: the remedy."""

import numpy as np
import torch
from clock import FIXED, Clock
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIDE, POINTS, SIGMA = 64, 68, 2.0


class HeatmapTarget:
    """Places one Gaussian per landmark."""

    def __init__(self, side, sigma):
        self.side, self.sigma = side, sigma

    def __call__(self, points):
        if FIXED:
            axis = np.arange(self.side, dtype=np.float32)
            profile = np.exp(-((axis - points[:, :, None]) ** 2) / (2 * self.sigma**2))
            return profile[:, 1, :, None] * profile[:, 0, None, :]
        target = np.zeros((len(points), self.side, self.side), np.float32)
        for k, (cx, cy) in enumerate(points):  # the cause
            xs, ys = np.meshgrid(np.arange(self.side), np.arange(self.side))  # the cause
            distance = (xs - cx) ** 2 + (ys - cy) ** 2  # the cause
            target[k] = np.exp(-distance / (2 * self.sigma**2))  # the cause
        return target


class Faces(Dataset):
    def __init__(self, count=2_000):
        rng = np.random.default_rng(1)
        self.shapes = rng.uniform(8, SIDE - 8, (40, POINTS, 2)).astype(np.float32)
        self.images = rng.integers(0, 255, (40, 3, SIDE, SIDE), np.uint8)
        self.count = count
        self.heatmaps = HeatmapTarget(SIDE, SIGMA)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        number = index % len(self.images)
        shift = np.float32(index // len(self.images) % 7 - 3)
        image = np.roll(self.images[number], int(shift), axis=2).astype(np.float32) / 255
        points = self.shapes[number] + np.array([shift, 0], np.float32)
        return torch.from_numpy(image), torch.from_numpy(self.heatmaps(points))


class LandmarkNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 5, stride=4, padding=2), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.head = nn.Sequential(nn.Conv2d(width, POINTS * 16, 1), nn.PixelShuffle(4))

    def forward(self, x):
        x = self.stem(x)
        return self.head(x + self.body(x))


def main():
    loader = DataLoader(Faces(), batch_size=8, shuffle=True)
    model = LandmarkNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    clock = Clock(80)
    for images, targets in loader:
        loss = nn.functional.mse_loss(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not clock.step():
            break
    print(f"loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
