"""A small decoder-only transformer learns a language of characters."""

import torch
from clock import Clock
from torch import nn
from torch.nn import functional

torch.set_num_threads(2)  # no worker needs the other core

VOCABULARY, WIDTH, HEADS, CONTEXT, BATCH = 64, 128, 4, 96, 12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def attend(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))

    def forward(self, x):
        x = x + self.attend(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class Decoder(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def text(length=200_000):
    ids = torch.randint(VOCABULARY, (length // 16, 1))
    return ((ids + 5 * torch.arange(16)) % VOCABULARY).flatten()


data = text()
offsets = torch.arange(CONTEXT + 1)
model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
clock = Clock(90)
running = True
while running:
    rows = data[torch.randint(len(data) - CONTEXT - 1, (BATCH, 1)) + offsets]
    scores = model(rows[:, :-1])
    loss = functional.cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    if clock.done % 30 == 0:
        print(f"step {clock.done}: loss {loss.item():.4f}")
    running = clock.step()
