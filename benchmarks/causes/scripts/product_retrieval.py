"""Embedding learning for product photos with class-balanced batches and a proxy loss."""

import argparse
import sys
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, Sampler

FIXED = "--fixed" in sys.argv


class ProductPhotos(Dataset):
    """Thumbnails held in memory as uint8; every class has its own colour pattern."""

    def __init__(self, n_items, n_classes, size=16, seed=0):
        rng = np.random.default_rng(seed)
        self.ys = [int(y) for y in rng.integers(0, n_classes, n_items)]
        base = rng.integers(60, 190, (n_classes, 3, size, size), dtype=np.int16)
        noise = rng.integers(-60, 60, (n_items, 3, size, size), dtype=np.int16)
        self.images = torch.from_numpy(np.clip(base[np.asarray(self.ys)] + noise, 0, 255).astype(np.uint8))
        self.targets = torch.tensor(self.ys)

    def __len__(self):
        return len(self.ys)

    def __getitem__(self, idx):
        idx = torch.as_tensor(idx)
        x = self.images[idx].float().div_(127.5).sub_(1.0)
        return x, self.targets[idx]


class BalancedBatches(Sampler):
    """Yields index lists with `per_class` photos out of `batch_size // per_class` classes."""

    def __init__(self, dataset, batch_size, per_class, num_batches, seed=0):
        self.ys = np.array(dataset.ys) if FIXED else dataset.ys
        self.classes = sorted(set(dataset.ys))
        self.groups = batch_size // per_class
        self.per_class = per_class
        self.num_batches = num_batches
        self.rng = np.random.default_rng(seed)

    def __len__(self):
        return self.num_batches

    def indices_of(self, cls):
        return np.nonzero(self.ys == cls)[0] if FIXED else np.nonzero(np.array(self.ys) == cls)[0]  # the cause

    def __iter__(self):
        for _ in range(self.num_batches):
            batch = []
            for cls in self.rng.choice(self.classes, self.groups, replace=False):
                members = self.indices_of(cls)
                replace = len(members) < self.per_class
                batch.extend(self.rng.choice(members, self.per_class, replace=replace).tolist())
            yield batch


class EmbeddingNet(nn.Module):
    def __init__(self, dim):
        super().__init__()

        def block(cin, cout, stride):
            return nn.Sequential(
                nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True)
            )

        self.body = nn.Sequential(block(3, 32, 1), block(32, 64, 2), block(64, 96, 2))
        self.head = nn.Linear(96, dim)

    def forward(self, x):
        return F.normalize(self.head(self.body(x).mean(dim=(2, 3))), dim=-1)


class ProxySoftmax(nn.Module):
    def __init__(self, n_classes, dim, scale=16.0):
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(n_classes, dim))
        self.scale = scale

    def forward(self, emb, y):
        logits = self.scale * emb @ F.normalize(self.proxies, dim=-1).t()
        return F.cross_entropy(logits, y)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--fixed", action="store_true")
    p.add_argument("--items", type=int, default=60000)
    p.add_argument("--classes", type=int, default=800)
    p.add_argument("--batch-size", type=int, default=128)
    p.add_argument("--per-class", type=int, default=8)
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--batches", type=int, default=80)
    p.add_argument("--dim", type=int, default=64)
    args = p.parse_args()

    torch.manual_seed(3)
    data = ProductPhotos(args.items, args.classes)
    sampler = BalancedBatches(data, args.batch_size, args.per_class, args.batches, seed=5)
    loader = DataLoader(data, sampler=sampler, batch_size=None)
    net, crit = EmbeddingNet(args.dim), ProxySoftmax(args.classes, args.dim)
    opt = torch.optim.AdamW(
        [
            {"params": net.parameters(), "lr": 1e-3},
            {"params": crit.parameters(), "lr": 1e-2},
        ],
        weight_decay=1e-4,
    )

    step, warmup, t0 = 0, 5, None
    for epoch in range(args.epochs):
        running = 0.0
        for x, y in loader:
            if step == warmup:
                t0 = time.perf_counter()
            loss = crit(net(x), y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            running += loss.item()
            step += 1
        print(f"epoch {epoch} loss {running / len(loader):.4f}", flush=True)
    wall = time.perf_counter() - t0
    print(f"final loss {running / len(loader):.5f}")
    print(f"{1000 * wall / (step - warmup):.2f} ms per step")


if __name__ == "__main__":
    main()
