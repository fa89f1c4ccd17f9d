"""Day-ahead electricity load forecasting with a patch transformer."""

import argparse
import math
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


def make_series(n_meters, hours, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(hours, dtype=torch.float32)
    phase = 2 * math.pi * torch.rand(n_meters, 2, generator=g)
    amp = 0.5 + torch.rand(n_meters, 2, generator=g)
    day = amp[:, :1] * torch.sin(2 * math.pi * t / 24 + phase[:, :1])
    week = amp[:, 1:] * torch.sin(2 * math.pi * t / 168 + phase[:, 1:])
    return day + week + 0.2 * torch.randn(n_meters, hours, generator=g)


class Windows:
    def __init__(self, series, context, horizon):
        self.context, self.horizon = context, horizon
        self.view = series.unfold(1, context + horizon, 1)

    def sample(self, n, gen):
        m = torch.randint(0, self.view.size(0), (n,), generator=gen)
        s = torch.randint(0, self.view.size(1), (n,), generator=gen)
        w = self.view[m, s]
        return w[:, : self.context], w[:, self.context :]


class EncoderBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ff = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d)
        x = x + self.proj(a)
        return x + self.ff(self.norm2(x))


class PatchForecaster(nn.Module):
    def __init__(self, context, horizon, patch, dim, depth, heads):
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(patch, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(context // patch, dim))
        self.blocks = nn.ModuleList(EncoderBlock(dim, heads) for _ in range(depth))
        self.head = nn.Linear(dim * (context // patch), horizon)

    def forward(self, x):
        mean, std = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-5
        z = ((x - mean) / std).unflatten(1, (-1, self.patch))
        h = self.embed(z) + self.pos
        for blk in self.blocks:
            h = blk(h)
        return self.head(h.flatten(1)) * std + mean


@torch.inference_mode()
def validate(model, data, seed):
    model.eval()
    x, y = data.sample(512, torch.Generator().manual_seed(seed))
    out = F.mse_loss(model(x), y)
    model.train()
    return out.item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--meters", type=int, default=200)
    p.add_argument("--hours", type=int, default=6000)
    p.add_argument("--context", type=int, default=336)
    p.add_argument("--horizon", type=int, default=24)
    p.add_argument("--batch-size", type=int, default=64)
    p.add_argument("--dim", type=int, default=128)
    p.add_argument("--depth", type=int, default=3)
    p.add_argument("--steps", type=int, default=350)
    args = p.parse_args()

    torch.manual_seed(0)
    gen = torch.Generator().manual_seed(1)
    series = make_series(args.meters, args.hours, 5)
    train = Windows(series[:, :5000], args.context, args.horizon)
    valid = Windows(series[:, 5000:], args.context, args.horizon)
    model = PatchForecaster(args.context, args.horizon, 8, args.dim, args.depth, heads=4)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.steps)

    warmup, t0, window = 5, None, torch.zeros(())
    for step in range(args.steps):
        if step == warmup:
            t0 = time.perf_counter()
        x, y = train.sample(args.batch_size, gen)
        loss = F.mse_loss(model(x), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        window += loss.detach()
        if (step + 1) % 50 == 0:
            mean = window.item() / 50
            window.zero_()
            print(f"step {step + 1} train {mean:.4f} valid {validate(model, valid, 9):.4f}", flush=True)
    wall = time.perf_counter() - t0
    print(f"final loss {mean:.5f}")
    print(f"{1000 * wall / (args.steps - warmup):.2f} ms per step")


if __name__ == "__main__":
    main()
