"""A backbone's weights are drawn at random, and then read from a file. --fixed: it is built without weights (meta)."""

import tempfile
from pathlib import Path

import torch
from clock import FIXED, Clock
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads=8):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.after(x))


class Backbone(nn.Module):
    """A transformer on patches, with the usual truncated normal weights."""

    def __init__(self, width=768, depth=30, patch=16):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.apply(self.init_weights)  # the cause

    @staticmethod
    def init_weights(module):
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)  # the cause
            nn.init.zeros_(module.bias)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        return self.norm(self.blocks(x)).mean(1)


def pretrained(path):
    """Build the backbone with the weights of a file."""
    if FIXED:
        with torch.device("meta"):
            backbone = Backbone()
        backbone.load_state_dict(torch.load(path, mmap=True), assign=True)
    else:
        backbone = Backbone()  # the cause
        backbone.load_state_dict(torch.load(path, mmap=True))
    return backbone.requires_grad_(False).eval()


def published(path):
    """Write a file of weights, as one downloads it; here all blocks have the same, to keep the file small."""
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in Backbone().state_dict().items()}
    weights = {shape: torch.full(shape, 0.01) for shape in set(shapes.values())}
    torch.save({name: weights[shape] for name, shape in shapes.items()}, path)


def main():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "backbone.pt"
        published(path)
        clock = Clock(12, warm=0)  # what is gained is the start: the time of the whole job, by its steps
        backbone = pretrained(path)
        head = nn.Linear(768, 10)
        optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
        while True:
            x, y = torch.rand(2, 3, 32, 32), torch.randint(10, (2,))
            with torch.no_grad():
                features = backbone(x)
            loss = nn.functional.cross_entropy(head(features), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not clock.step():
                break


main()
