"""Classifies whale calls from hydrophone recordings, two ranks: torchrun --nproc-per-node 2 whale_calls.py"""

import argparse
import gc
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RATE, WINDOW, HOP, BANDS, SPECIES = 8000, 512, 128, 64, 9


class Hydrophone:
    """Numbered recordings; the n-th is always the same, with its own noise and shift."""

    def __init__(self, seconds=2.0):
        self.samples = int(RATE * seconds)
        self.window = np.hanning(WINDOW).astype(np.float32)
        edges = np.geomspace(2, WINDOW // 2, BANDS + 2)
        bins = np.arange(WINDOW // 2 + 1)[:, None]
        rise = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
        fall = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
        self.bank = np.clip(np.minimum(rise, fall), 0, None).astype(np.float32)

    def example(self, number):
        rng = np.random.default_rng(number)
        species = int(rng.integers(SPECIES))
        t = np.arange(self.samples, dtype=np.float32) / RATE
        call = np.sin(2 * np.pi * (80 + 60 * species) * t * (1 + 0.2 * np.sin(2 * np.pi * t)))
        wave = np.roll(call, int(rng.integers(self.samples))) + rng.normal(scale=0.8, size=self.samples)
        frames = np.lib.stride_tricks.sliding_window_view(wave.astype(np.float32), WINDOW)[::HOP]
        power = np.abs(np.fft.rfft(frames * self.window, axis=1)).astype(np.float32) ** 2
        return np.log(power @ self.bank + 1e-4).T, species


def make_batch(source, numbers):
    spectra, species = zip(*(source.example(n) for n in numbers))
    return np.stack(spectra), np.array(species)


class BatchFeed:
    """Gives every rank its part of each global batch."""

    def __init__(self, source, per_rank, rank, world):
        self.source, self.per_rank, self.rank, self.world = source, per_rank, rank, world
        self.position = 0

    def numbers(self):
        first = self.position
        self.position += self.per_rank * self.world
        return range(first, self.position)


class MainProcessFeed(BatchFeed):
    def next(self):
        numbers = self.numbers()
        box = [make_batch(self.source, numbers) if self.rank == 0 else None]  # the cause
        dist.broadcast_object_list(box, src=0)  # the cause
        mine = slice(self.rank * self.per_rank, (self.rank + 1) * self.per_rank)
        return tuple(torch.from_numpy(part[mine]) for part in box[0])


class ShardFeed(BatchFeed):
    def next(self):
        numbers = self.numbers()[self.rank * self.per_rank : (self.rank + 1) * self.per_rank]
        return tuple(torch.from_numpy(part) for part in make_batch(self.source, numbers))


def network():
    def stage(a, b):
        return nn.Sequential(nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.GroupNorm(4, b), nn.ReLU())

    return nn.Sequential(
        stage(1, 8), stage(8, 16), stage(16, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, SPECIES)
    )


def run(fixed, steps, per_rank):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    feed = (ShardFeed if fixed else MainProcessFeed)(Hydrophone(), per_rank, rank, world)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    for step in range(steps):
        if step == 10:
            begun = time.perf_counter()
        spectra, species = feed.next()
        loss = criterion(model(spectra.unsqueeze(1)), species)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    took = (time.perf_counter() - begun) / (steps - 10) * 1000
    mean = loss.detach() / world
    dist.reduce(mean, dst=0)
    if rank == 0:
        print(f"{took:.2f} ms per step\nloss {mean.item():.6f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--per-rank", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    run(args.fixed, args.steps, args.per_rank)
    gc.collect()
    dist.destroy_process_group()
