"""Self-supervised embeddings of moth wings (variance, invariance, covariance), with a watch on collapse."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn


class WingViews:
    """Two augmented views of the same wings."""

    def __init__(self, count=1024, side=24, seed=4):
        g = torch.Generator().manual_seed(seed)
        coarse = torch.randn(count, 3, 6, 6, generator=g)
        self.wings = F.interpolate(coarse, size=(side, side), mode="bilinear")

    def augment(self, wings):
        flip = torch.rand(len(wings), 1, 1, 1) < 0.5
        wings = torch.where(flip, wings.flip(-1), wings)
        return wings * (0.8 + 0.4 * torch.rand(len(wings), 3, 1, 1)) + 0.1 * torch.randn_like(wings)

    def batch(self, size):
        wings = self.wings[torch.randint(len(self.wings), (size,))]
        return self.augment(wings), self.augment(wings)


class Encoder(nn.Module):
    def __init__(self, dim=256):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, 2, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 36, dim),
            nn.ReLU(),
        )
        self.expander = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))

    def forward(self, x):
        features = self.body(x)
        return features, self.expander(features)


def vicreg(a, b):
    similar = F.mse_loss(a, b)
    spread = covary = 0.0
    for z in (a, b):
        z = z - z.mean(0)
        spread = spread + F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean()
        covariance = z.T @ z / (len(z) - 1)
        covary = covary + (covariance.pow(2).sum() - covariance.diagonal().pow(2).sum()) / z.shape[1]
    return 25 * similar + 25 * spread + covary


@torch.no_grad()
def effective_rank(z):
    s = torch.linalg.svdvals(z)  # the cause
    p = s / s.sum() + 1e-7
    return torch.exp(-(p * p.log()).sum()).item()


class CollapseWatch:
    def __init__(self, every=100):
        self.every, self.history = every, []

    def after_step(self, step, features, embedding, encoder):
        row = self.measure(step, features, embedding, encoder)  # the cause
        if step % self.every == 0:
            self.history.append(row)

    def measure(self, step, features, embedding, encoder):
        weights = [p for p in encoder.expander.parameters() if p.ndim == 2]
        return {
            "step": step,
            "features": effective_rank(features),
            "embedding": effective_rank(embedding),
            "weights": [effective_rank(w) for w in weights],
        }


class SparseWatch(CollapseWatch):
    def after_step(self, step, features, embedding, encoder):
        if step % self.every == 0:
            self.history.append(self.measure(step, features, embedding, encoder))


def pretrain(args):
    torch.manual_seed(args.seed)
    views, encoder = WingViews(), Encoder()
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3)
    watch = SparseWatch() if args.fixed else CollapseWatch()
    for step in range(args.steps):
        if step == 10:
            start = time.perf_counter()
        first, second = views.batch(args.batch)
        features, a = encoder(first)
        _, b = encoder(second)
        loss = vicreg(a, b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.after_step(step, features, a, encoder)
    print(f"{(time.perf_counter() - start) / (args.steps - 10) * 1e3:.2f} ms per step")
    print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    pretrain(parser.parse_args())
