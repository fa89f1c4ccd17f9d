"""A small transformer learns the characters of made-up verse."""

import math

import torch
import torch.nn.functional as F
from clock import Clock
from torch import nn

WIDTH, HEADS, LAYERS, LENGTH, BATCH, STEPS = 128, 4, 3, 96, 16, 110
WORDS = "the a sea night wind song stone light river gold and of in over sings falls turns waits".split()


def verse(lines=6000):
    picks = torch.randint(len(WORDS), (lines, 6)).tolist()
    return "\n".join(" ".join(WORDS[pick] for pick in line) for line in picks)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.dense = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.first(x))
        return x + self.dense(self.second(x))


class Verse(nn.Module):
    def __init__(self, characters):
        super().__init__()
        self.tokens, self.places = nn.Embedding(characters, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def batches(data):
    ahead = torch.arange(LENGTH + 1)
    while True:
        rows = data[torch.randint(len(data) - LENGTH - 1, (BATCH, 1)) + ahead]
        yield rows[:, :-1], rows[:, 1:]


def warm_up(step, warm=20):
    return min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / STEPS))


text = verse()
alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
data = torch.tensor([alphabet[character] for character in text])
model = Verse(len(alphabet))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
clock = Clock(STEPS)
for step, (inputs, targets) in enumerate(batches(data), 1):
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    if step % 25 == 0:
        print(f"{step:4} loss {loss.item():.4f}")
    if not clock.step():
        break
