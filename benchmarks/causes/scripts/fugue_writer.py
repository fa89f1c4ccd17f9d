"""Decoder-only model of keyboard fugues (event tokens), data parallel: torchrun --nproc-per-node 2 fugue_writer.py"""

import argparse
import gc
import math
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EVENTS, LONGEST = 388, 1024


class RelativeAttention(nn.Module):
    """Self-attention with a fixed distance penalty per head, tables for the longest piece that is ever sampled."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        place = torch.arange(LONGEST)
        distance = (place[:, None] - place[None, :]).float()
        slopes = torch.tensor([2.0 ** (-8 * (h + 1) / heads) for h in range(heads)])
        penalty = -slopes[:, None, None] * distance.clamp(min=0)
        self.register_buffer("bias", penalty.masked_fill(distance < 0, -1e9))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(c // self.heads) + self.bias[:, :t, :t]
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = RelativeAttention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.between(x))


class FugueModel(nn.Module):
    def __init__(self, width=96, heads=2, depth=4):
        super().__init__()
        self.events = nn.Embedding(EVENTS, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, EVENTS)

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.events(tokens))))


class Corpus:
    """Pieces as one long row of events; each rank draws its own excerpts."""

    def __init__(self, length=200_000, seed=3):
        g = torch.Generator().manual_seed(seed)
        steps = torch.randint(-4, 5, (length,), generator=g)
        self.events = (steps.cumsum(0) % EVENTS).long()

    def excerpts(self, count, length, generator):
        starts = torch.randint(len(self.events) - length - 1, (count,), generator=generator)
        rows = self.events[starts[:, None] + torch.arange(length + 1)]
        return rows[:, :-1], rows[:, 1:]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--excerpt", type=int, default=96)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    if args.fixed:
        model = DistributedDataParallel(FugueModel(), forward_sync_buffers=False)
    else:
        model = DistributedDataParallel(FugueModel())  # the cause
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    corpus, draws = Corpus(), torch.Generator().manual_seed(100 + rank)
    for step in range(args.steps):
        if step == 10:
            start = time.perf_counter()
        tokens, following = corpus.excerpts(8, args.excerpt, draws)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    took = (time.perf_counter() - start) / (args.steps - 10) * 1e3
    total = loss.detach().clone()
    dist.all_reduce(total)
    if rank == 0:
        print(f"{took:.2f} ms per step\nloss {total.item() / dist.get_world_size():.6f}")


if __name__ == "__main__":
    main()
    gc.collect()
    dist.destroy_process_group()
