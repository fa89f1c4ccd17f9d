"""The added tokens are looked for one by one, in every text. --fixed: one pattern finds all of them."""

import re

import torch
from clock import FIXED, Clock
from torch.utils.data import DataLoader, Dataset

ADDED = [f"<entity{n}>" for n in range(3000)]
WORDS = {word: n for n, word in enumerate([*ADDED, *(f"w{n}" for n in range(500))])}
ANY = re.compile(r"(<entity\d+>)")


def pieces(text):
    """Put blanks around the added tokens, and split the text."""
    if FIXED:
        return ANY.sub(r" \1 ", text).split()
    for token in ADDED:
        if token in text:  # the cause
            text = text.replace(token, f" {token} ")  # the cause
    return text.split()


class Texts(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        words = (f"<entity{index * m % 3000}>" if m % 10 == 0 else f"w{index * m % 500} " for m in range(1, 65))
        found = pieces("".join(words))  # the cause
        return torch.tensor([WORDS[word] for word in found])


embedding = torch.nn.Embedding(len(WORDS), 96)
layer = torch.nn.TransformerEncoderLayer(96, 4, dim_feedforward=192, dropout=0.0, batch_first=True)
optimizer = torch.optim.SGD([*embedding.parameters(), *layer.parameters()], lr=1e-3)
clock = Clock(250)
for x in DataLoader(Texts(), batch_size=16, shuffle=True):
    loss = layer(embedding(x)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
