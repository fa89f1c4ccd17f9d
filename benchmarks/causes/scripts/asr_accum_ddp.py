"""Frame-level acoustic model with gradient accumulation, two ranks over gloo."""

import argparse
import contextlib
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

FIXED = "--fixed" in sys.argv


class FrameStream:
    """Each phone has a template; frames are templates mixed with their neighbours."""

    def __init__(self, n_phones, n_mels, frames, rank):
        self.templates = torch.randn(n_phones, n_mels, generator=torch.Generator().manual_seed(1))
        self.g = torch.Generator().manual_seed(100 + rank)
        self.frames = frames

    def utterances(self, n):
        phones = torch.randint(0, self.templates.size(0), (n, self.frames // 4), generator=self.g)
        labels = phones.repeat_interleave(4, dim=1)
        feats = self.templates[labels]
        feats = 0.6 * feats + 0.2 * feats.roll(1, 1) + 0.2 * feats.roll(-1, 1)
        return feats + torch.randn(feats.shape, generator=self.g), labels


class ConvFF(nn.Module):
    def __init__(self, dim, mult):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mix = nn.Conv1d(dim, dim, 5, padding=2, groups=dim)
        self.up, self.down = nn.Linear(dim, mult * dim), nn.Linear(mult * dim, dim)

    def forward(self, x):
        h = self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.down(torch.relu(self.up(h)))


class AcousticModel(nn.Module):
    def __init__(self, n_mels, n_phones, dim, depth):
        super().__init__()
        self.inp = nn.Linear(n_mels, dim)
        self.blocks = nn.Sequential(*[ConvFF(dim, 4) for _ in range(depth)])
        self.out = nn.Linear(dim, n_phones)

    def forward(self, feats):
        return self.out(self.blocks(self.inp(feats))).transpose(1, 2)


def accumulate(ddp, criterion, stream, n_utts, accum):
    """Runs `accum` micro-batches; gradients are exchanged with the last one."""
    total = 0.0
    for micro in range(accum):
        feats, labels = stream.utterances(n_utts)
        last = micro == accum - 1
        ctx = contextlib.nullcontext() if last else ddp.no_sync()
        if FIXED:
            with ctx:
                loss = criterion(ddp(feats), labels) / accum
                loss.backward()
        else:
            loss = criterion(ddp(feats), labels) / accum  # the cause
            with ctx:  # the cause
                loss.backward()
        total += loss.item()
    return total


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--fixed", action="store_true")
    p.add_argument("--utts", type=int, default=2)
    p.add_argument("--frames", type=int, default=64)
    p.add_argument("--n-mels", type=int, default=80)
    p.add_argument("--phones", type=int, default=48)
    p.add_argument("--dim", type=int, default=384)
    p.add_argument("--depth", type=int, default=6)
    p.add_argument("--accum", type=int, default=6)
    p.add_argument("--steps", type=int, default=62)
    p.add_argument("--lr", type=float, default=4e-4)
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    stream = FrameStream(args.phones, args.n_mels, args.frames, rank)
    ddp = DistributedDataParallel(AcousticModel(args.n_mels, args.phones, args.dim, args.depth))
    opt = torch.optim.AdamW(ddp.parameters(), lr=args.lr, fused=True)
    criterion = nn.CrossEntropyLoss()

    warmup, t0 = 3, None
    for step in range(args.steps):
        if step == warmup:
            dist.barrier()
            t0 = time.perf_counter()
        opt.zero_grad(set_to_none=True)
        loss = accumulate(ddp, criterion, stream, args.utts, args.accum)
        nn.utils.clip_grad_norm_(ddp.parameters(), 5.0)
        opt.step()
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1} xent {loss:.4f}", flush=True)
    dist.barrier()
    wall = time.perf_counter() - t0
    if rank == 0:
        print(f"final loss {loss:.5f}")
        print(f"{1000 * wall / (args.steps - warmup):.2f} ms per step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
