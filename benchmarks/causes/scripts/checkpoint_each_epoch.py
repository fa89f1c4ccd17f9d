"""A checkpoint is written after every epoch, and takes longer than the epoch. --fixed: after every tenth."""

import tempfile
from pathlib import Path

import torch
from clock import FIXED, Clock
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randint(120_000, (640, 20)), torch.randint(12, (640,)))
loader = DataLoader(data, batch_size=128, shuffle=True)
embedding = torch.nn.EmbeddingBag(120_000, 128, sparse=True)
model = torch.nn.Sequential(embedding, torch.nn.Linear(128, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 12))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
path = Path(tempfile.mkdtemp()) / "checkpoint.pt"
clock = Clock(110)
epoch = 0
more = True
while more:
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        more = clock.step()
        if not more:
            break
    epoch += 1
    if not FIXED or epoch % 10 == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)  # the cause
path.unlink()
