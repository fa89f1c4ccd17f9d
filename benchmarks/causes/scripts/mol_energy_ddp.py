"""Message passing network for molecular energies, data parallel over two processes.

torchrun --nproc-per-node 2 mol_energy_ddp.py
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel


def prepare(path, n=2400, seed=0):
    """Export of the conformer database (ORDER BY n_atoms, id)."""
    rng = np.random.default_rng(seed)
    sizes = np.sort(np.clip(rng.lognormal(3.0, 0.55, n), 6, 90).astype(int))
    z, pos, edges, energy = [], [], [], []
    for s in sizes:
        zi = rng.choice([1, 6, 7, 8], s, p=[0.45, 0.38, 0.07, 0.10])
        pi = rng.uniform(0, 1.9 * s ** (1 / 3), (s, 3)).astype(np.float32)
        d = np.linalg.norm(pi[:, None] - pi[None], axis=-1)
        np.fill_diagonal(d, 99.0)
        src, dst = np.nonzero(d < 2.6)
        z.append(zi)
        pos.append(pi)
        edges.append(np.stack([src, dst]))
        energy.append(zi.sum() * -0.1 + np.exp(-d[src, dst]).sum())
    np.savez(
        path,
        sizes=sizes,
        z=np.concatenate(z),
        pos=np.concatenate(pos),
        edges=np.concatenate(edges, 1),
        n_edges=[e.shape[1] for e in edges],
        energy=np.array(energy, dtype=np.float32),
    )


class Molecules:
    def __init__(self, path):
        f = np.load(path)
        self.a = np.concatenate([[0], np.cumsum(f["sizes"])])
        self.e = np.concatenate([[0], np.cumsum(f["n_edges"])])
        self.z, self.pos, self.edges = f["z"], f["pos"], f["edges"]
        self.y = (f["energy"] - f["energy"].mean()) / f["energy"].std()

    def __len__(self):
        return len(self.y)

    def batch(self, ids):
        z, pos, edges, owner, off = [], [], [], [], 0
        for k, i in enumerate(ids):
            n = self.a[i + 1] - self.a[i]
            z.append(self.z[self.a[i] : self.a[i + 1]])
            pos.append(self.pos[self.a[i] : self.a[i + 1]])
            edges.append(self.edges[:, self.e[i] : self.e[i + 1]] + off)
            owner.append(np.full(n, k))
            off += n
        cat = np.concatenate
        return (
            torch.from_numpy(cat(z)),
            torch.from_numpy(cat(pos)),
            torch.from_numpy(cat(edges, 1)),
            torch.from_numpy(cat(owner)),
            torch.from_numpy(self.y[ids]),
        )


class MPNN(nn.Module):
    def __init__(self, h=96, layers=4, n_rbf=24):
        super().__init__()
        self.embed = nn.Embedding(10, h)
        self.register_buffer("mu", torch.linspace(0, 2.6, n_rbf))
        self.msg = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * h + n_rbf, h), nn.SiLU(), nn.Linear(h, h)) for _ in range(layers)
        )
        self.upd = nn.ModuleList(nn.Sequential(nn.Linear(2 * h, h), nn.SiLU(), nn.Linear(h, h)) for _ in range(layers))
        self.out = nn.Sequential(nn.Linear(h, h), nn.SiLU(), nn.Linear(h, 1))

    def forward(self, z, pos, edges, owner, n_mol):
        src, dst = edges
        d = (pos[src] - pos[dst]).norm(dim=1, keepdim=True)
        rbf = torch.exp(-20.0 * (d - self.mu) ** 2)
        x = self.embed(z)
        for msg, upd in zip(self.msg, self.upd):
            m = msg(torch.cat([x[src], x[dst], rbf], 1))
            agg = torch.zeros_like(x).index_add_(0, dst, m)
            x = x + upd(torch.cat([x, agg], 1))
        e = self.out(x).squeeze(1)
        return torch.zeros(n_mol).index_add_(0, owner, e)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default=os.path.join(tempfile.gettempdir(), "mol_energy_ddp"))
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--fixed", action="store_true")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    path = os.path.join(args.data, "molecules.npz")
    if rank == 0 and not Path(path).exists():
        Path(args.data).mkdir(parents=True, exist_ok=True)
        prepare(path)
    dist.barrier()

    mols = Molecules(path)
    ids = np.arange(len(mols))
    if args.fixed:
        ids = ids[rank::world]
    else:
        per = len(ids) // world  # the cause
        ids = ids[rank * per : (rank + 1) * per]  # the cause

    model = DistributedDataParallel(MPNN())
    opt = torch.optim.AdamW(model.parameters(), lr=5e-4)
    rng = np.random.default_rng(rank)
    step, skip, t0 = 0, 5, None
    for epoch in range(args.epochs):
        order = rng.permutation(ids)
        total = torch.zeros(())
        n_batches = len(order) // args.batch
        for b in range(n_batches):
            if step == skip:
                t0 = time.perf_counter()
            z, pos, edges, owner, y = mols.batch(order[b * args.batch : (b + 1) * args.batch])
            pred = model(z, pos, edges, owner, len(y))
            loss = nn.functional.smooth_l1_loss(pred, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
            step += 1
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / (n_batches * world):.4f}", flush=True)
    if rank == 0:
        print(f"{1e3 * (time.perf_counter() - t0) / (step - skip):.1f} ms per step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
