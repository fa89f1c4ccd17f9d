"""A small language model of bytes whose feed-forward layers are mixtures of experts. --fixed: the remedy."""

import torch
import torch.nn.functional as F
from clock import FIXED, Clock
from torch import nn

VOCABULARY, WIDTH, HIDDEN, HEADS, LAYERS = 96, 96, 192, 4, 2
EXPERTS, CHOSEN, LENGTH, BATCH, STEPS = 8, 2, 96, 12, 80


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x):
        shape, x = x.shape, x.flatten(0, 1)
        scores, chosen = self.router(x).softmax(-1).topk(CHOSEN)
        scores = scores / scores.sum(-1, keepdim=True)
        if FIXED:
            return self.routed(x, scores, chosen).view(shape)
        weights = torch.zeros(len(x), EXPERTS).scatter(1, chosen, scores)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)  # the cause
        return (outputs * weights[:, :, None]).sum(1).view(shape)  # the cause

    def routed(self, x, scores, chosen):
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            out = out.index_add(0, token, expert(x[token]) * scores[token, place, None])
        return out


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mixture = Mixture()

    def forward(self, x):
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mixture(self.second(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def corpus(size=200_000):
    table = torch.randint(VOCABULARY, (VOCABULARY, 4))
    text, choices = [0], torch.randint(4, (size,)).tolist()
    following = table.tolist()
    for choice in choices:
        text.append(following[text[-1]][choice])
    return torch.tensor(text)


text = corpus()
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
clock, going = Clock(STEPS), True
while going:
    begins = torch.randint(len(text) - LENGTH - 1, (BATCH, 1))
    rows = text[begins + torch.arange(LENGTH + 1)]
    loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    going = clock.step()
print(f"loss {loss.item():.5f}")
