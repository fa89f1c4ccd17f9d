"""Validation writes text by running the model on all of it for each character. --fixed: keys and values are kept."""

import torch
from clock import FIXED, Clock
from torch import nn

LETTERS, WIDTH, HEADS, LENGTH = 40, 96, 4, 96


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, past=None):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        return self.out(y.transpose(1, 2).reshape(batch, length, WIDTH)), (k, v)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, past=None):
        y, past = self.attention(self.norm1(x), past)
        x = x + y
        return x + self.mlp(self.norm2(x)), past


class Decoder(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.letters, self.positions = nn.Embedding(LETTERS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, LETTERS)

    def forward(self, ids, past=None):
        start = 0 if past is None else past[0][0].shape[2]
        x = self.letters(ids) + self.positions(torch.arange(start, start + ids.shape[1]))
        kept = []
        for n, block in enumerate(self.blocks):
            x, pair = block(x, None if past is None else past[n])
            kept.append(pair)
        return self.head(x), kept


@torch.no_grad()
def greedy(model, ids, letters):
    """Write so many more letters."""
    past, following = None, ids
    for _ in range(letters):
        if FIXED:
            scores, past = model(following, past)
        else:
            scores, _ = model(ids)  # the cause
        following = scores[:, -1:].argmax(-1)
        ids = torch.cat([ids, following], 1)
    return ids


def validate(model, sentences, given=16):
    model.eval()
    written = greedy(model, sentences[:, :given], LENGTH - given)  # the cause
    model.train()
    return (written[:, given:] == sentences[:, given:]).float().mean().item()


def sentences(count):
    start, stride = torch.randint(0, LETTERS, (count, 1)), torch.randint(1, 4, (count, 1))
    return (start + stride * torch.arange(LENGTH)) % LETTERS


model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
held_out = sentences(16)
best, clock = 0.0, Clock(140)
while True:
    batch = sentences(8)
    scores, _ = model(batch[:, :-1])
    loss = nn.functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if clock.done % 25 == 24:
        best = max(best, validate(model, held_out))  # the cause
    if not clock.step():
        break
