"""A masked language model scores the vocabulary at every token, for a loss on 15 %. --fixed: at the masked tokens."""

import math

import torch
from clock import FIXED, Clock
from torch import nn

VOCABULARY, WIDTH, LENGTH, BATCH = 10_000, 128, 64, 8
MASK, IGNORED = 3, -100


class Encoder(nn.Module):
    def __init__(self, layers=2, heads=4):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, heads, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, ids):
        return self.layers(self.tokens(ids) * math.sqrt(WIDTH) + self.positions)


class MaskedLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.transform = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))
        self.decoder = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))

    def logits(self, hidden):
        return self.decoder(self.transform(hidden)) + self.bias  # the cause

    def forward(self, ids, labels):
        hidden = self.encoder(ids)
        if FIXED:
            masked = labels != IGNORED
            return nn.functional.cross_entropy(self.logits(hidden[masked]), labels[masked])
        scores = self.logits(hidden)  # the cause
        return nn.functional.cross_entropy(  # the cause
            scores.view(-1, VOCABULARY),
            labels.view(-1),
            ignore_index=IGNORED,  # the cause
        )


class Masking:
    """Hides tokens as BERT does: of those chosen, most are masked, some replaced, some left."""

    def __init__(self, share=0.15):
        self.share = share

    def __call__(self, ids):
        chosen = torch.rand(ids.shape) < self.share
        labels = torch.where(chosen, ids, IGNORED)
        chance = torch.rand(ids.shape)
        ids = torch.where(chosen & (chance < 0.8), MASK, ids)
        return torch.where(chosen & (chance > 0.9), torch.randint(5, VOCABULARY, ids.shape), ids), labels


def batches(masking):
    corpus = torch.randint(5, VOCABULARY, (400, LENGTH))
    while True:
        for rows in torch.randperm(len(corpus)).split(BATCH):
            yield masking(corpus[rows])


def warm_up(step, steps=30):
    return min(1.0, (step + 1) / steps)


model = MaskedLM()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
clock = Clock(30)
for ids, labels in batches(Masking()):
    loss = model(ids, labels)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    if not clock.step():
        break
