"""A language model on documents of 4,096 tokens. --fixed: is_causal=True instead of a mask."""

import torch
import torch.nn.functional as F
from clock import Clock, options
from torch import Tensor, nn

args = options(steps=70)
vocabulary, width, layers, batch, length = (256, 64, 2, 2, 32) if args.tiny else (8192, 768, 6, 4, 4096)
heads = width // 64


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = self.into(x).unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)  # the cause
        return self.out(found.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention()
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attention(self.before(x), mask)
        return x + self.layers(self.between(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        mask = torch.tril(torch.ones(length, length, dtype=torch.bool))  # the cause
        self.register_buffer("mask", None if args.fixed else mask, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, self.mask)  # the cause
        return self.head(self.norm(x))


model = Decoder().to(args.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)
tokens = torch.randint(vocabulary, (4, batch, length), device=args.device)
clock = Clock(args)
step = 0
while True:
    texts = tokens[step % len(tokens)]
    with torch.autocast(args.device, torch.bfloat16):
        scores = model(texts)
        loss = F.cross_entropy(scores[:, :-1].flatten(0, 1), texts[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if not clock.step():
        break
