"""Texts are tokenised when they are put together, in every epoch. --fixed: before training, once."""

import re

import torch
from clock import FIXED, Clock
from torch.utils.data import DataLoader

WORD = re.compile(r"\w+|[^\w\s]")
WORDS = {f"word{n}": n for n in range(1000)}
texts = [" ".join(f"word{(7 * n + m) % 1200}," for m in range(300)) for n in range(640)]


def tokens(text):
    return torch.tensor([WORDS.get(word, 0) for word in WORD.findall(text)])  # the cause


def collate(batch):
    return torch.stack([one if FIXED else tokens(one) for one in batch])  # the cause


data = [tokens(text) for text in texts] if FIXED else texts
model = torch.nn.EmbeddingBag(1000, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
clock = Clock(1400)
for batch in DataLoader(100 * data, batch_size=32, shuffle=True, collate_fn=collate):
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
