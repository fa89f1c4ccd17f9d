"""Finds arrhythmias in electrocardiograms with gated layers whose filters reach over the whole record."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn


def simulate(count, leads, length, generator):
    """Records with a rhythm of their own, and for each whether beats are missed, early, or broadened."""
    t = torch.arange(length) / 250
    rate = 0.8 + 0.8 * torch.rand(count, 1, generator=generator)
    labels = (torch.rand(count, 3, generator=generator) < 0.3).float()
    phase = (t * rate) % 1.0
    width = 0.03 + 0.04 * labels[:, 2:]
    beat = torch.exp(-(((phase - 0.4) / width) ** 2)) + 0.2 * torch.exp(-(((phase - 0.7) / 0.08) ** 2))
    missed = 1 - labels[:, :1] * ((t * rate) % 5 > 4)
    early = labels[:, 1:2] * torch.exp(-((((t * rate) % 3 - 2.05) / 0.03) ** 2))
    gain = 0.5 + torch.rand(count, leads, 1, generator=generator)
    noise = 0.1 * torch.randn(count, leads, length, generator=generator)
    return gain * (beat * missed + early).unsqueeze(1) + noise, labels


class LongFilter(nn.Module):
    """One causal filter a channel, as long as the record, given by a few decaying waves and a skip."""

    def __init__(self, channels, length, fixed, waves=8):
        super().__init__()
        self.length, self.fixed = length, fixed
        self.frequency = nn.Parameter(torch.rand(channels, waves) * 0.2)
        self.decay = nn.Parameter(torch.rand(channels, waves).mul(-4).exp() * 0.1)
        self.weight = nn.Parameter(torch.randn(channels, waves) / waves)
        self.skip = nn.Parameter(torch.ones(channels, 1))
        self.register_buffer("time", torch.arange(length, dtype=torch.float32))

    def kernel(self):
        waves = torch.cos(self.frequency.unsqueeze(2) * self.time) * torch.exp(
            -self.decay.abs().unsqueeze(2) * self.time
        )
        return (self.weight.unsqueeze(2) * waves).sum(1)

    def forward(self, x):
        kernel = self.kernel()
        if self.fixed:
            n = 2 * self.length
            y = torch.fft.irfft(torch.fft.rfft(x, n) * torch.fft.rfft(kernel, n), n)[..., : self.length]
        else:
            padded = F.pad(x, (self.length - 1, 0))
            y = F.conv1d(padded, kernel.flip(1).unsqueeze(1), groups=x.shape[1])  # the cause
        return y + self.skip * x


class Block(nn.Module):
    def __init__(self, width, length, fixed):
        super().__init__()
        self.norm = nn.GroupNorm(1, width)
        self.expand, self.project = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(width, width, 1)
        self.filter = LongFilter(width, length, fixed)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        value, gate = self.expand(self.norm(x)).chunk(2, dim=1)
        return x + self.drop(self.project(self.filter(value) * F.silu(gate)))


class Arrhythmia(nn.Module):
    def __init__(self, leads, classes, length, width, depth, fixed):
        super().__init__()
        self.stem = nn.Conv1d(leads, width, 5, padding=2)
        self.blocks = nn.Sequential(*[Block(width, length, fixed) for _ in range(depth)])
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x):
        x = self.blocks(self.stem(x))
        return self.head(torch.cat([x.mean(2), x.amax(2)], dim=1))


def run(args):
    generator = torch.Generator().manual_seed(0)
    records, labels = simulate(args.records, args.leads, args.length, generator)
    model = Arrhythmia(args.leads, labels.shape[1], args.length, args.width, args.depth, args.fixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    balance = (labels == 0).sum(0) / (labels == 1).sum(0)
    step, running, began = 0, 0.0, time.perf_counter()
    while step < args.steps:
        for rows in torch.randperm(len(records), generator=generator).split(args.batch):
            logits = model(records[rows])
            loss = F.binary_cross_entropy_with_logits(logits, labels[rows], pos_weight=balance)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step, running = step + 1, running + loss.detach()
            if step % 20 == 0:
                print(f"step {step} loss {running.item() / 20:.4f}", flush=True)
                running = 0.0
            if step == args.steps:
                break
    print(f"{(time.perf_counter() - began) / step * 1e3:.2f} ms per step")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--records", type=int, default=400)
    parser.add_argument("--length", type=int, default=600)
    parser.add_argument("--leads", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--fixed", action="store_true")
    torch.manual_seed(0)
    run(parser.parse_args())
