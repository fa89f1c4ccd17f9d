"""Energy regression on molecules of very different size, data parallel over ranks."""

import argparse
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

FIXED = "--fixed" in sys.argv


class Molecule:
    __slots__ = ("edges", "energy", "kinds", "length", "size")

    def __init__(self, size, degree, gen, pair):
        self.size = size
        self.kinds = torch.randint(0, pair.size(0), (size,), generator=gen)
        src = torch.arange(size).repeat_interleave(degree)
        dst = (src + torch.randint(1, size, src.shape, generator=gen)) % size
        self.edges = torch.stack([src, dst])
        self.length = 0.8 + torch.rand(src.numel(), generator=gen)
        bond = pair[self.kinds[src], self.kinds[dst]] / self.length
        self.energy = bond.mean()


def build_molecules(count, degree, seed):
    gen = torch.Generator().manual_seed(seed)
    pair = torch.randn(8, 8, generator=gen)
    sizes = torch.exp(3.9 + 1.05 * torch.randn(count, generator=gen)).clamp(8, 400).int().tolist()
    return [Molecule(s, degree, gen, pair) for s in sizes]


def collate(mols):
    offsets = torch.tensor([0] + [m.size for m in mols]).cumsum(0)
    kinds = torch.cat([m.kinds for m in mols])
    edges = torch.cat([m.edges + o for m, o in zip(mols, offsets)], dim=1)
    length = torch.cat([m.length for m in mols])
    owner = torch.repeat_interleave(torch.arange(len(mols)), torch.tensor([m.size for m in mols]))
    return kinds, edges, length, owner, torch.stack([m.energy for m in mols])


class ShardedMolecules:
    """Draws the same global batch on every rank and hands out this rank's share of it."""

    def __init__(self, mols, global_batch, seed):
        self.mols, self.global_batch = mols, global_batch
        self.gen = torch.Generator().manual_seed(seed)

    def share_of(self, picked, rank, world):
        by_size = sorted(picked, key=lambda i: self.mols[i].size)
        share = self.global_batch // world
        return by_size[rank::world] if FIXED else by_size[rank * share : (rank + 1) * share]  # the cause

    def next(self, rank, world):
        picked = torch.randperm(len(self.mols), generator=self.gen)[: self.global_batch].tolist()
        return collate([self.mols[i] for i in self.share_of(picked, rank, world)])


class MessageLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(2 * dim + 1, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.node = nn.Sequential(nn.Linear(2 * dim, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, h, edges, length):
        src, dst = edges
        msg = self.edge(torch.cat([h[src], h[dst], length[:, None]], dim=1))
        agg = torch.zeros_like(h).index_add_(0, src, msg)
        return h + self.node(torch.cat([h, agg], dim=1))


class EnergyNet(nn.Module):
    def __init__(self, dim, depth):
        super().__init__()
        self.embed = nn.Embedding(8, dim)
        self.layers = nn.ModuleList(MessageLayer(dim) for _ in range(depth))
        self.readout = nn.Linear(dim, 1)

    def forward(self, kinds, edges, length, owner, n_graphs):
        h = self.embed(kinds)
        for layer in self.layers:
            h = layer(h, edges, length)
        total = torch.zeros(n_graphs, h.size(1)).index_add_(0, owner, h)
        count = torch.bincount(owner, minlength=n_graphs)[:, None]
        return self.readout(total / count).squeeze(1)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--fixed", action="store_true")
    p.add_argument("--molecules", type=int, default=3000)
    p.add_argument("--degree", type=int, default=6)
    p.add_argument("--global-batch", type=int, default=32)
    p.add_argument("--dim", type=int, default=64)
    p.add_argument("--depth", type=int, default=3)
    p.add_argument("--steps", type=int, default=350)
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    mols = build_molecules(args.molecules, args.degree, seed=21)
    feed = ShardedMolecules(mols, args.global_batch, seed=5)
    model = DistributedDataParallel(EnergyNet(args.dim, args.depth))
    opt = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

    seen, warmup, t0 = torch.zeros(2), 5, None
    for step in range(args.steps):
        if step == warmup:
            dist.barrier()
            t0 = time.perf_counter()
        kinds, edges, length, owner, energy = feed.next(rank, world)
        pred = model(kinds, edges, length, owner, energy.size(0))
        loss = F.mse_loss(pred, energy)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        seen += torch.tensor([loss.item(), 1.0])
        if (step + 1) % 35 == 0:
            dist.all_reduce(seen)
            final = (seen[0] / seen[1]).item()
            seen.zero_()
            if rank == 0:
                print(f"step {step + 1} mse {final:.4f}", flush=True)
    dist.barrier()
    wall = time.perf_counter() - t0
    if rank == 0:
        print(f"final loss {final:.5f}")
        print(f"{1000 * wall / (args.steps - warmup):.2f} ms per step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
