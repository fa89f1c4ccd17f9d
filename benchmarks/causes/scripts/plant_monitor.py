"""Remaining-useful-life regression for a process plant, trained in chronological order.

The log starts with the commissioning phase, in which temporary test probes are mounted
next to the permanent instruments. Channels of dismounted probes read zero afterwards.
"""

import argparse
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

FIXED = "--fixed" in sys.argv


class PlantLog:
    def __init__(self, channels, permanent, commissioning, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.channels, self.permanent = channels, permanent
        self.commissioning = commissioning
        self.coef = torch.randn(permanent, generator=self.g) / permanent**0.5

    def window(self, hour, batch_size):
        live = self.channels if hour < self.commissioning else self.permanent
        x = torch.zeros(batch_size, self.channels)
        x[:, :live] = torch.randn(batch_size, live, generator=self.g)
        wear = x[:, : self.permanent] @ self.coef
        noise = 0.1 * torch.randn(batch_size, generator=self.g)
        return x, torch.tanh(wear) + noise


class LifeRegressor(nn.Module):
    def __init__(self, channels, hidden):
        super().__init__()
        self.inp = nn.Linear(channels, hidden)
        self.mid = nn.Linear(hidden, 128)
        self.norm = nn.LayerNorm(128)
        self.out = nn.Linear(128, 1)

    def forward(self, x):
        h = F.relu(self.inp(x))
        h = F.relu(self.norm(self.mid(h)))
        return self.out(h).squeeze(1)


class RunningMean:
    def __init__(self, momentum=0.98):
        self.momentum, self.value = momentum, None

    def add(self, v):
        self.value = v if self.value is None else self.momentum * self.value + (1 - self.momentum) * v


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--fixed", action="store_true")
    p.add_argument("--channels", type=int, default=3072)
    p.add_argument("--permanent", type=int, default=256)
    p.add_argument("--commissioning", type=int, default=60)
    p.add_argument("--hidden", type=int, default=512)
    p.add_argument("--batch-size", type=int, default=64)
    p.add_argument("--hours", type=int, default=2200)
    p.add_argument("--lr", type=float, default=3e-4)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--report-every", type=int, default=200)
    return p.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    torch.set_flush_denormal(FIXED)
    log = PlantLog(args.channels, args.permanent, args.commissioning, seed=12)
    model = LifeRegressor(args.channels, args.hidden)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    mean = RunningMean()

    warmup, t0 = 10, None
    for hour in range(args.hours):
        if hour == warmup:
            t0 = time.perf_counter()
        x, y = log.window(hour, args.batch_size)
        loss = F.smooth_l1_loss(model(x), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()  # the cause
        mean.add(loss.item())
        if (hour + 1) % args.report_every == 0:
            rate = 1000 * (time.perf_counter() - t0) / (hour + 1 - warmup)
            print(f"hour {hour + 1} loss {mean.value:.4f} ({rate:.1f} ms)", flush=True)
    wall = time.perf_counter() - t0
    print(f"final loss {mean.value:.6f}")
    print(f"{1000 * wall / (args.hours - warmup):.2f} ms per step")


if __name__ == "__main__":
    main()
