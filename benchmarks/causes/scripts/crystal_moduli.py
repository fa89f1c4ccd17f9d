"""Message passing over crystal graphs for elastic moduli, two ranks: torchrun --nproc-per-node 2 crystal_moduli.py"""

import argparse
import gc
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler


@dataclass
class Settings:
    crystals: int = 1500
    neighbours: int = 12
    per_rank: int = 10
    seed: int = 0
    fixed: bool = False
    steps: int = 150


class Crystals(Dataset):
    def __init__(self, settings):
        rng = np.random.default_rng(settings.seed)
        self.sizes = np.clip(rng.lognormal(4.0, 1.1, settings.crystals), 8, 500).astype(int)
        self.neighbours = settings.neighbours

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, index):
        g, n = torch.Generator().manual_seed(int(index)), int(self.sizes[index])
        kinds = torch.randint(40, (n,), generator=g)
        source = torch.randint(n, (n * self.neighbours,), generator=g)
        length = torch.rand(n * self.neighbours, 1, generator=g)
        return kinds, source, length, (kinds.float().mean() / 40 - 0.5) * 3


def collate(samples):
    offsets = np.cumsum([0] + [len(s[0]) for s in samples])
    kinds = torch.cat([s[0] for s in samples])
    source = torch.cat([s[1] + int(o) for s, o in zip(samples, offsets)])
    target = torch.arange(len(kinds)).repeat_interleave(len(source) // len(kinds))
    owner = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor([len(s[0]) for s in samples]))
    return kinds, source, target, torch.cat([s[2] for s in samples]), owner, torch.stack([s[3] for s in samples])


class SizedBatches(Sampler):
    """Each rank's part of every global batch, the batch in order of the number of atoms."""

    def __init__(self, sizes, settings, rank, world):
        self.sizes, self.settings, self.rank, self.world = sizes, settings, rank, world

    def __iter__(self):
        rng, count = np.random.default_rng(self.settings.seed + 7), self.settings.per_rank
        while True:
            order = rng.permutation(len(self.sizes))
            for start in range(0, len(order) - count * self.world + 1, count * self.world):
                batch = sorted(order[start : start + count * self.world], key=lambda i: self.sizes[i])
                yield self.dealt(batch) if self.settings.fixed else self.share(batch)

    def share(self, batch):
        return batch[self.rank * self.settings.per_rank : (self.rank + 1) * self.settings.per_rank]  # the cause

    def dealt(self, batch):
        there, back = self.rank, 2 * self.world - 1 - self.rank
        return batch[there :: 2 * self.world] + batch[back :: 2 * self.world]


class CrystalNet(nn.Module):
    def __init__(self, width=64, layers=3):
        super().__init__()
        self.atoms = nn.Embedding(40, width)
        self.messages = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * width + 1, width), nn.SiLU(), nn.Linear(width, width)) for _ in range(layers)
        )
        self.read = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, kinds, source, target, length, owner, graphs):
        h = self.atoms(kinds)
        for message in self.messages:
            m = message(torch.cat([h[source], h[target], length], 1))
            h = h + torch.zeros_like(h).index_add(0, target, m) / 10
        pooled = (
            h.new_zeros(graphs, h.shape[1]).index_add(0, owner, h) / torch.bincount(owner, minlength=graphs)[:, None]
        )
        return self.read(pooled).squeeze(1)


def train(settings):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(settings.seed)
    crystals = Crystals(settings)
    batches = SizedBatches(crystals.sizes, settings, rank, world)
    loader = iter(DataLoader(crystals, batch_sampler=batches, collate_fn=collate))
    net = DistributedDataParallel(CrystalNet())
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for step in range(settings.steps):
        if step == 10:
            start = time.perf_counter()
        *graph, modulus = next(loader)
        loss = nn.functional.mse_loss(net(*graph, len(modulus)), modulus)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    took = (time.perf_counter() - start) / (settings.steps - 10)
    both = loss.detach().clone()
    dist.all_reduce(both)
    if rank == 0:
        print(f"{took * 1e3:.2f} ms per step\nloss {both.item() / world:.6f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(Settings(fixed=options.fixed, steps=options.steps))
    gc.collect()
    dist.destroy_process_group()
