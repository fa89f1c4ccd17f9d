"""Dilated convolutional surrogate for 2-D Darcy flow (permeability -> pressure)."""

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


def solve(a, iters=150):
    """Jacobi iterations for -div(a grad p) = 1, zero boundary."""
    n = a.shape[-1]
    p = np.zeros_like(a)
    ae = 0.5 * (a + np.roll(a, -1, -1))
    an = 0.5 * (a + np.roll(a, -1, -2))
    aw, as_ = np.roll(ae, 1, -1), np.roll(an, 1, -2)
    for _ in range(iters):
        p = (
            ae * np.roll(p, -1, -1)
            + aw * np.roll(p, 1, -1)
            + an * np.roll(p, -1, -2)
            + as_ * np.roll(p, 1, -2)
            + 1.0 / n**2
        ) / (ae + aw + an + as_)
        p[..., 0, :] = p[..., -1, :] = p[..., :, 0] = p[..., :, -1] = 0
    return p


def prepare(path, n=240, size=48):
    rng = np.random.default_rng(0)
    k = np.fft.fftfreq(size, 1 / size)
    decay = 1.0 / (1 + k[:, None] ** 2 + k[None] ** 2)
    noise = np.fft.ifft2(np.fft.fft2(rng.normal(size=(n, size, size))) * decay).real
    a = np.where(noise > 0, 12.0, 3.0)
    np.savez(path, a=a, p=solve(a))


class DilatedBlock(nn.Module):
    def __init__(self, ch, dilation):
        super().__init__()
        self.c1 = nn.Conv2d(ch, ch, 3, padding=dilation, dilation=dilation)
        self.c2 = nn.Conv2d(ch, ch, 3, padding=1)

    def forward(self, x):
        return x + self.c2(F.gelu(self.c1(F.gelu(x))))


class Surrogate(nn.Module):
    def __init__(self, ch=16, dilations=(1, 2, 4, 8)):
        super().__init__()
        self.lift = nn.Conv2d(3, ch, 3, padding=1)
        self.blocks = nn.Sequential(*[DilatedBlock(ch, d) for d in dilations])
        self.proj = nn.Sequential(nn.Conv2d(ch, 48, 1), nn.GELU(), nn.Conv2d(48, 1, 1))

    def forward(self, a):
        n = a.shape[-1]
        g = torch.linspace(0, 1, n, dtype=a.dtype)
        grid = torch.stack(torch.meshgrid(g, g, indexing="ij")).expand(len(a), -1, -1, -1)
        return self.proj(self.blocks(self.lift(torch.cat([a, grid], 1))))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default=os.path.join(tempfile.gettempdir(), "darcy_surrogate"))
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--fixed", action="store_true")
    args = ap.parse_args()

    path = os.path.join(args.data, "darcy48.npz")
    if not Path(path).exists():
        Path(args.data).mkdir(parents=True, exist_ok=True)
        prepare(path)
    f = np.load(path)
    a = torch.from_numpy(f["a"]).unsqueeze(1)
    p = torch.from_numpy(f["p"]).unsqueeze(1)
    a = (a - a.mean()) / a.std()
    p = (p - p.mean()) / p.std()

    torch.manual_seed(0)
    model = Surrogate()
    if args.fixed:
        a, p = a.float(), p.float()
    else:
        model = model.double()  # the cause
    opt = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-5)

    step, skip, t0 = 0, 4, None
    for epoch in range(args.epochs):
        total = torch.zeros((), dtype=a.dtype)
        batches = torch.randperm(len(a)).split(args.batch)
        for idx in batches:
            if step == skip:
                t0 = time.perf_counter()
            pred = model(a[idx])
            err = (pred - p[idx]).flatten(1).norm(dim=1) / p[idx].flatten(1).norm(dim=1)
            loss = err.mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
            step += 1
        print(f"epoch {epoch}  relative L2 {total.item() / len(batches):.5f}", flush=True)
    print(f"{1e3 * (time.perf_counter() - t0) / (step - skip):.1f} ms per step")


if __name__ == "__main__":
    main()
