"""Detects cars on parking lots seen from above, as peaks of a map with a size and an offset at each peak."""

import argparse
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

STRIDE = 4


class ParkingLots(Dataset):
    """An item is a grey image and, padded to the most cars there are, the boxes (cx, cy, w, h) with their number."""

    def __init__(self, count, size, most=20, seed=0):
        self.size, self.most = size, most
        rng = np.random.default_rng(seed)
        self.boxes, self.images = [], rng.integers(60, 90, (count, size, size), dtype=np.uint8)
        for image in self.images:
            cars = int(rng.integers(4, most + 1))
            sides = rng.integers(8, 20, (cars, 2))
            corners = (rng.random((cars, 2)) * (size - sides)).astype(int)
            for (x, y), (w, h) in zip(corners, sides):
                image[y : y + h, x : x + w] = rng.integers(130, 250)
            self.boxes.append(np.concatenate([corners + sides / 2, sides], axis=1).astype(np.float32))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        boxes = np.zeros((self.most, 4), np.float32)
        boxes[: len(self.boxes[index])] = self.boxes[index]
        image, flip = self.images[index], index % 2 == 1
        if flip:
            image, boxes[:, 0] = image[:, ::-1].copy(), self.size - boxes[:, 0]
        return torch.from_numpy(image).unsqueeze(0), torch.from_numpy(boxes), len(self.boxes[index])


def targets(boxes, counts, side):
    """Heat maps with a Gaussian about each car, and for each car its cell, offset and log size."""
    centre, size = boxes[..., :2] / STRIDE, boxes[..., 2:] / STRIDE
    cell = centre.long().clamp(0, side - 1)
    present = torch.arange(boxes.shape[1]) < counts.unsqueeze(1)
    sigma = (size.amin(2) / 3).clamp(min=0.5).unsqueeze(2)
    grid = torch.arange(side, dtype=torch.float32)
    across = torch.exp(-((grid - cell[..., :1]) ** 2) / (2 * sigma**2))
    down = torch.exp(-((grid - cell[..., 1:]) ** 2) / (2 * sigma**2)) * present.unsqueeze(2)
    heat = (down.unsqueeze(3) * across.unsqueeze(2)).amax(1)
    return heat, cell[..., 1] * side + cell[..., 0], centre - cell, size.clamp(min=0.1).log(), present


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x):
        return F.relu(x + self.body(x))


class Detector(nn.Module):
    def __init__(self, width=24, depth=3):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(width, width, 3, stride=2, padding=1)
        )
        self.body = nn.Sequential(*[Residual(width) for _ in range(depth)])
        self.head = nn.Conv2d(width, 5, 1)
        nn.init.constant_(self.head.bias[:1].detach(), -3.0)

    def forward(self, images):
        return self.head(self.body(self.stem(images.float().div_(255).sub_(0.35))))


def detection_loss(out, boxes, counts):
    heat, cells, offset, size, present = targets(boxes, counts, out.shape[-1])
    logits, p = out[:, 0], out[:, 0].sigmoid()
    peak = heat > 0.999
    focal = torch.where(peak, -((1 - p) ** 2) * F.logsigmoid(logits), -((1 - heat) ** 4) * p**2 * F.logsigmoid(-logits))
    at = out[:, 1:].flatten(2).gather(2, cells.unsqueeze(1).expand(-1, 4, -1)).transpose(1, 2)
    error = (at - torch.cat([offset, size], dim=2)).abs().sum(2)
    cars = present.sum()
    return focal.sum() / cars, (error * present).sum() / cars


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--images", type=int, default=1200)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    torch.manual_seed(0)
    data = ParkingLots(args.images, 160)
    loader = DataLoader(data, args.batch, shuffle=True, num_workers=1, persistent_workers=True, drop_last=True)
    model = Detector()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step, began = 0, time.perf_counter()
    for epoch in range(args.epochs):
        for images, boxes, counts in loader:
            heat, place = detection_loss(model(images), boxes, counts)
            loss = heat + 0.5 * place
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 25 == 0:
                print(f"epoch {epoch} step {step} heat {heat.item():.3f} place {place.item():.3f}", flush=True)
    print(f"{(time.perf_counter() - began) / step * 1e3:.2f} ms per step")


if __name__ == "__main__":
    main()
