"""Patch transformer for day-ahead electricity load, sharded with FSDP2.

torchrun --nproc-per-node 2 load_forecast_fsdp.py
"""

import argparse
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def make_series(n_meters=64, days=120, seed=0):
    rng = np.random.default_rng(seed)
    t = np.arange(days * 96) / 96.0
    phase = rng.uniform(0, 1, (n_meters, 1))
    level = rng.gamma(3.0, 1.0, (n_meters, 1))
    x = level * (1.5 + np.sin(2 * np.pi * (t + phase)) + 0.4 * np.sin(2 * np.pi * t / 7))
    x += rng.normal(0, 0.15, x.shape)
    x = (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)
    return torch.from_numpy(x.astype(np.float32))


class Layer(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d)
        self.proj = nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.n2(x))


class Forecaster(nn.Module):
    def __init__(self, d=256, depth=4, heads=4, patch=24, context=672, horizon=96):
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(patch, d)
        self.pos = nn.Parameter(torch.randn(context // patch, d) * 0.02)
        self.layers = nn.ModuleList(Layer(d, heads) for _ in range(depth))
        self.head = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, horizon))

    def forward(self, x):
        x = self.embed(x.unflatten(1, (-1, self.patch))) + self.pos
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, -1])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=45)
    ap.add_argument("--micro-batch", type=int, default=2)
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--fixed", action="store_true")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)

    series = make_series()
    model = Forecaster()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)  # the cause
    fully_shard(model, mesh=mesh)  # the cause
    opt = torch.optim.AdamW(model.parameters(), lr=2e-4)

    gen = torch.Generator().manual_seed(rank)

    def get_batch():
        meter = torch.randint(series.shape[0], (args.micro_batch,), generator=gen)
        start = torch.randint(series.shape[1] - 768, (args.micro_batch,), generator=gen)
        w = torch.stack([series[m, s : s + 768] for m, s in zip(meter, start)])
        return w[:, :672], w[:, 672:]

    t0, skip = None, 5
    for step in range(args.steps):
        if step == skip:
            dist.barrier()
            t0 = time.perf_counter()
        total = 0.0
        for i in range(args.accum):
            if args.fixed:
                last = i == args.accum - 1
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(last)
                model.set_reshard_after_forward(False)
            x, y = get_batch()
            loss = nn.functional.l1_loss(model(x), y) / args.accum  # the cause
            loss.backward()  # the cause
            total = total + loss.detach()
        opt.step()
        opt.zero_grad()
        if step % 10 == 0 or step == args.steps - 1:
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step} mae {total.item() / world:.4f}", flush=True)
    dist.barrier()
    if rank == 0:
        print(f"{1e3 * (time.perf_counter() - t0) / (args.steps - skip):.1f} ms per step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
