"""Classifies household objects from depth-camera point clouds with a small PointNet."""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--clouds", type=int, default=320)
parser.add_argument("--points", type=int, default=2048, help="points in a stored cloud")
parser.add_argument("--num_point", type=int, default=128, help="points given to the network")
parser.add_argument("--batch_size", type=int, default=16)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--fixed", action="store_true")
CLASSES = 8


def make_clouds(root, count, points):
    rng = np.random.default_rng(0)
    for number in range(count):
        kind = number % CLASSES
        cloud = rng.normal(size=(points, 3))
        cloud /= np.linalg.norm(cloud, axis=1, keepdims=True) ** (0.3 * (kind % 4))
        cloud *= 1 + 0.25 * np.array([kind & 1, kind >> 1 & 1, kind >> 2])
        np.save(root / f"{number:04d}_{kind}.npy", cloud.astype(np.float32))


def farthest_point_sample(cloud, count):
    """Chooses `count` points, each the farthest from those before it."""
    chosen = np.zeros(count, dtype=np.int64)
    distance = np.full(len(cloud), np.inf, dtype=np.float32)
    for i in range(1, count):
        distance = np.minimum(distance, ((cloud - cloud[chosen[i - 1]]) ** 2).sum(1))  # the cause
        chosen[i] = distance.argmax()
    return cloud[chosen]


class ObjectClouds(Dataset):
    def __init__(self, root, num_point, presampled):
        self.paths = sorted(root.glob("*.npy"))
        self.labels = [int(path.stem.split("_")[1]) for path in self.paths]
        self.num_point = num_point
        self.sampled = [farthest_point_sample(np.load(p), num_point) for p in self.paths] if presampled else None

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        if self.sampled is None:
            cloud = farthest_point_sample(np.load(self.paths[index]), self.num_point)  # the cause
        else:
            cloud = self.sampled[index]
        cloud = torch.from_numpy(cloud - cloud.mean(0))
        cloud = cloud / cloud.norm(dim=1).max()
        angle = torch.rand(()) * 2 * torch.pi
        cos, sin = angle.cos(), angle.sin()
        x, y, z = cloud.unbind(1)
        turned = torch.stack([x * cos - y * sin, x * sin + y * cos, z], 0)
        return turned + 0.01 * torch.randn_like(turned), self.labels[index]


class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [3, 64, 128, 256]
        self.points = nn.Sequential(
            *[
                nn.Sequential(nn.Conv1d(a, b, 1, bias=False), nn.BatchNorm1d(b), nn.ReLU())
                for a, b in zip(widths, widths[1:])
            ]
        )
        self.head = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, CLASSES))

    def forward(self, clouds):
        return self.head(self.points(clouds).amax(2))


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as root:
        make_clouds(Path(root), args.clouds, args.points)
        dataset = ObjectClouds(Path(root), args.num_point, presampled=args.fixed)
        loader = DataLoader(dataset, args.batch_size, shuffle=True, num_workers=2, persistent_workers=True)
        model = PointNet()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step, began = 0, time.perf_counter()
        for epoch in range(args.epochs):
            right = seen = 0
            for clouds, labels in loader:
                logits = model(clouds)
                loss = F.cross_entropy(logits, labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                right, seen, step = right + (logits.argmax(1) == labels).sum().item(), seen + len(labels), step + 1
            print(f"epoch {epoch} step {step} loss {loss.item():.4f} accuracy {right / seen:.3f}", flush=True)
        print(f"{(time.perf_counter() - began) / step * 1e3:.2f} ms per step")


if __name__ == "__main__":
    main()
