"""Tells diseased leaves from healthy ones, and keeps a log of the machine beside the loss."""

import argparse
import csv
import os
import subprocess
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_leaves(count, size=32):
    """Green ovals, some of which have brown spots."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    width = 0.4 + 0.4 * torch.rand(count, 1, 1)
    leaf = ((x / width) ** 2 + (y / 0.9) ** 2 < 1).float()
    images = torch.stack([0.2 * leaf, 0.7 * leaf, 0.2 * leaf], 1) + 0.15 * torch.randn(count, 3, size, size)
    ill = torch.randint(2, (count,))
    center = 0.6 * torch.rand(count, 2, 1, 1) - 0.3
    spot = ((x - center[:, 0]) ** 2 + (y - center[:, 1]) ** 2 < 0.02).float() * ill[:, None, None]
    images[:, 0] += 0.5 * spot
    images[:, 1] -= 0.4 * spot
    return TensorDataset(images, ill)


class SqueezeBlock(nn.Module):
    def __init__(self, inside, out):
        super().__init__()
        self.conv = nn.Conv2d(inside, out, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(out)
        self.gate = nn.Sequential(nn.Linear(out, out // 4), nn.ReLU(), nn.Linear(out // 4, out), nn.Sigmoid())

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x)))
        return x * self.gate(x.mean((2, 3)))[:, :, None, None]


class LeafNet(nn.Sequential):
    def __init__(self):
        super().__init__(
            SqueezeBlock(3, 16),
            SqueezeBlock(16, 32),
            SqueezeBlock(32, 64),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 2),
        )


def usage():
    """Memory in MB and share of the processor of this process."""
    command = ["ps", "-o", "rss=,pcpu=", "-p", str(os.getpid())]
    rss, share = subprocess.run(command, capture_output=True, text=True).stdout.split()  # the cause
    return int(rss) / 1024, float(share)


class RunLog:
    def __init__(self, path, every, only_shown):
        self.file = open(path, "w", newline="")
        self.writer = csv.writer(self.file)
        self.writer.writerow(["step", "loss", "memory_mb", "cpu_percent"])
        self.every, self.only_shown = every, only_shown

    def log(self, step, loss):
        shown = step % self.every == 0
        if self.only_shown and not shown:
            self.writer.writerow([step, loss, "", ""])
            return
        memory, share = usage()  # the cause
        self.writer.writerow([step, loss, f"{memory:.1f}", share])
        if shown:
            print(f"step {step} loss {loss:.5f} memory {memory:.0f} MB", flush=True)

    def close(self):
        self.file.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=3200)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--log_every", type=int, default=50)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    loader = DataLoader(make_leaves(args.images), 32, shuffle=True)
    model = LeafNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    with tempfile.TemporaryDirectory() as folder:
        log = RunLog(Path(folder) / "log.csv", args.log_every, only_shown=args.fixed)
        step, began = 0, time.perf_counter()
        for _ in range(args.epochs):
            for images, ill in loader:
                loss = F.cross_entropy(model(images), ill)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                log.log(step, loss.item())
        print(f"{(time.perf_counter() - began) / step * 1e3:.2f} ms per step")
        log.close()


if __name__ == "__main__":
    main()
