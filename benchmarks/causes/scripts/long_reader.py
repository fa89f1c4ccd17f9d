"""Character language model over long documents; each layer looks back over a window of characters."""

import math
import time
from argparse import ArgumentParser
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    vocabulary: int = 96
    context: int = 768
    window: int = 64
    width: int = 64
    heads: int = 4
    layers: int = 2
    batch: int = 2
    blocked: bool = False


class WindowAttention(nn.Module):
    """Causal attention in which a position sees itself and the window - 1 positions before it."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        position = torch.arange(config.context)
        distance = position[:, None] - position
        self.register_buffer("mask", (distance >= 0) & (distance < config.window), persistent=False)
        near = torch.arange(config.window)[:, None] + config.window - torch.arange(2 * config.window)
        self.register_buffer("near", (near >= 0) & (near < config.window), persistent=False)

    def whole(self, q, k, v):
        length = q.shape[2]
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # the cause
        scores = scores.masked_fill(~self.mask[:length, :length], -1e9)  # the cause
        return scores.softmax(-1) @ v  # the cause

    def blocks(self, q, k, v):
        """Each block of queries against its own block of keys and the one before it."""
        window = self.config.window
        q = q.unflatten(2, (-1, window))
        k, v = (F.pad(t, (0, 0, window, 0)).unfold(2, 2 * window, window).transpose(-2, -1) for t in (k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        seen = self.near.repeat(scores.shape[2], 1, 1)
        seen[0, :, :window] = False
        return (scores.masked_fill(~seen, -1e9).softmax(-1) @ v).flatten(2, 3)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.config.heads, -1).permute(2, 0, 3, 1, 4)
        y = self.blocks(q, k, v) if self.config.blocked else self.whole(q, k, v)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(config.width) for _ in range(2))
        self.attention = WindowAttention(config)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Reader(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)

    def forward(self, tokens, targets):
        x = self.norm(self.blocks(self.embed(tokens)))
        return F.cross_entropy((x @ self.embed.weight.T / 8).flatten(0, 1), targets.flatten())


def corpus(config, size=400_000):
    words = torch.randint(config.vocabulary, (300, 7))
    return words[torch.randint(300, (size // 7,))].flatten()


def train(config, steps):
    torch.manual_seed(0)
    text, model = corpus(config), Reader(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    span = torch.arange(config.context + 1)
    for step in range(steps):
        if step == 10:
            start = time.perf_counter()
        chunk = text[torch.randint(len(text) - len(span), (config.batch, 1)) + span]
        loss = model(chunk[:, :-1], chunk[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{(time.perf_counter() - start) / (steps - 10) * 1e3:.2f} ms per step")
    print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=130)
    options = parser.parse_args()
    train(Config(blocked=options.fixed), options.steps)
