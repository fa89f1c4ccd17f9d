"""A sample is taken from a column of a table, which is converted whole for it. --fixed: from a row."""

import numpy as np
import torch
from clock import FIXED, Clock
from torch.utils.data import DataLoader, Dataset


class Table:
    """Columns by name and rows by number, in lists of Python's, as libraries of tables give them."""

    def __init__(self, **columns):
        self.columns = columns

    def __getitem__(self, key):
        if isinstance(key, str):
            return self.columns[key].tolist()  # the cause
        return {name: column[key].tolist() for name, column in self.columns.items()}


rng = np.random.default_rng(0)
table = Table(tokens=rng.integers(0, 1000, (800, 40)), label=rng.integers(0, 2, 800))


class Sentences(Dataset):
    def __len__(self):
        return 80_000

    def __getitem__(self, index):
        if FIXED:
            row = table[index % 800]
            return torch.tensor(row["tokens"]), row["label"]
        return torch.tensor(table["tokens"][index % 800]), table["label"][index % 800]  # the cause


embedding, recurrent = torch.nn.Embedding(1000, 64), torch.nn.GRU(64, 64, batch_first=True)
head = torch.nn.Linear(64, 2)
optimizer = torch.optim.Adam([*embedding.parameters(), *recurrent.parameters(), *head.parameters()])
clock = Clock(250)
for x, y in DataLoader(Sentences(), batch_size=16, shuffle=True):
    loss = torch.nn.functional.cross_entropy(head(recurrent(embedding(x))[0][:, -1]), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
