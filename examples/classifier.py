"""A small classifier, written as many are: it trains well, and takes longer than it need. `make demo` finds out why.

Nothing in it knows of dlprof. The mistake is in the line of the optimizer.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 3

torch.manual_seed(0)
features = torch.randn(1600, 512)
labels = features[:, :10].argmax(1)
loader = DataLoader(TensorDataset(features, labels), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

for epoch in range(epochs):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)
