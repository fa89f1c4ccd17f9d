"""MoCo-style contrastive pretraining on small satellite tiles (2 processes).

torchrun --nproc-per-node 2 moco_pretrain.py
"""

import argparse
import copy
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.skip = nn.Conv2d(cin, cout, 1, stride, bias=False)

    def forward(self, x):
        h = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(h)) + self.skip(x))


def encoder(dim):
    return nn.Sequential(
        Block(3, 24, 2),
        Block(24, 48, 2),
        Block(48, 96, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(96, 96),
        nn.ReLU(inplace=True),
        nn.Linear(96, dim),
    )


class MoCo(nn.Module):
    def __init__(self, dim=128, size=65536, m=0.99, temperature=0.2):
        super().__init__()
        self.size, self.m, self.temperature = size, m, temperature
        self.q = encoder(dim)
        self.k = copy.deepcopy(self.q)
        for p in self.k.parameters():
            p.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(size, dim), dim=1))  # the cause
        self.ptr = 0

    @torch.no_grad()
    def update_key_encoder(self):
        for p, pk in zip(self.q.parameters(), self.k.parameters()):
            pk.mul_(self.m).add_(p, alpha=1 - self.m)

    @torch.no_grad()
    def enqueue(self, keys):
        out = [torch.empty_like(keys) for _ in range(dist.get_world_size())]
        dist.all_gather(out, keys)
        keys = torch.cat(out)
        n = keys.shape[0]
        self.queue[self.ptr : self.ptr + n] = keys
        self.ptr = (self.ptr + n) % self.size

    def forward(self, xq, xk):
        q = F.normalize(self.q(xq), dim=1)
        with torch.no_grad():
            k = F.normalize(self.k(xk), dim=1)
        pos = (q * k).sum(1, keepdim=True)
        neg = q @ self.queue.t()
        return torch.cat([pos, neg], 1) / self.temperature, k


def augment(x):
    if torch.rand(()) < 0.5:
        x = x.flip(-1)
    x = torch.roll(x, tuple(torch.randint(-6, 7, (2,)).tolist()), (-2, -1))
    gain = torch.empty(x.shape[0], 3, 1, 1).uniform_(0.7, 1.3)
    return x * gain + 0.05 * torch.randn_like(x)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=80)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--queue", type=int, default=65536)
    ap.add_argument("--fixed", action="store_true")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    base = F.interpolate(torch.randn(1024, 3, 6, 6), size=48, mode="bilinear")
    tiles = base[rank::world].contiguous()

    model = MoCo(size=args.queue)
    if args.fixed:
        model = DistributedDataParallel(model, forward_sync_buffers=False)
    else:
        model = DistributedDataParallel(model)  # the cause
    moco = model.module
    opt = torch.optim.SGD(moco.q.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    target = torch.zeros(args.batch, dtype=torch.long)

    torch.manual_seed(100 + rank)
    t_start, skip = None, 8
    for step in range(args.steps):
        if step == skip:
            t_start = time.perf_counter()
        x = tiles[torch.randint(len(tiles), (args.batch,))]
        moco.update_key_encoder()
        logits, keys = model(augment(x), augment(x))
        loss = F.cross_entropy(logits, target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        moco.enqueue(keys)
        if rank == 0 and step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)

    if rank == 0:
        dt = time.perf_counter() - t_start
        print(f"final loss {loss.item():.4f}")
        print(f"{1e3 * dt / (args.steps - skip):.1f} ms per step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
