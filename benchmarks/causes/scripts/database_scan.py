"""Samples are rows of a database, looked up by a column without an index. --fixed: with one."""

import sqlite3

import numpy as np
import torch
from clock import FIXED, Clock
from torch.utils.data import DataLoader, Dataset

SIZE = 5000


class Rows(Dataset):
    def __init__(self):
        self.base = sqlite3.connect(":memory:")
        self.base.execute("CREATE TABLE vectors (name TEXT, vector BLOB)")
        rng = np.random.default_rng(0)
        rows = ((f"patent{n}", rng.random(64, np.float32).tobytes()) for n in range(SIZE))
        self.base.executemany("INSERT INTO vectors VALUES (?, ?)", rows)
        if FIXED:
            self.base.execute("CREATE INDEX by_name ON vectors (name)")

    def __len__(self):
        return 100 * SIZE

    def __getitem__(self, index):
        query = "SELECT vector FROM vectors WHERE name = ?"
        (vector,) = self.base.execute(query, (f"patent{index % SIZE}",)).fetchone()  # the cause
        return torch.from_numpy(np.frombuffer(vector, np.float32).copy())


model = torch.nn.Sequential(
    torch.nn.Linear(64, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64)
)
optimizer = torch.optim.Adam(model.parameters())
clock = Clock(300)
for x in DataLoader(Rows(), batch_size=32, shuffle=True):
    loss = torch.nn.functional.mse_loss(model(x), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
