"""Attention written out: products, scaling, mask, softmax. --fixed: scaled_dot_product_attention."""

import math

import torch
import torch.nn.functional as F
from clock import Clock, options
from torch import Tensor, nn

args = options(steps=50)
width, heads, layers, batch, length = (64, 2, 2, 2, 16) if args.tiny else (768, 12, 8, 8, 1024)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.register_buffer("hidden", torch.ones(length, length, dtype=torch.bool).triu(1))

    def attention(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if args.fixed:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])  # the cause
        scores = scores.masked_fill(self.hidden, float("-inf"))  # the cause
        return F.softmax(scores, -1) @ value  # the cause

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.into(self.before(x)).unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attention(query, key, value).transpose(1, 2).flatten(2))  # the cause
        return x + self.layers(self.between(x))


model = nn.Sequential(nn.Embedding(4096, width), *(Block() for _ in range(layers)), nn.Linear(width, 4096))
model.to(args.device)
tokens = torch.randint(4096, (batch, length), device=args.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
clock = Clock(args)
while True:
    with torch.autocast(args.device, torch.bfloat16):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
