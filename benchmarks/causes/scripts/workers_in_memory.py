"""Workers send batches of what is in memory anyway. --fixed: none."""

import torch
from clock import FIXED, Clock
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.rand(6000, 3, 32, 32), torch.randint(10, (6000,)))
loader = DataLoader(data, batch_size=64, num_workers=0 if FIXED else 2)  # the cause
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3, stride=2), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 15 * 15, 10)
)
optimizer = torch.optim.Adam(model.parameters())
clock = Clock(700)
more = True
while more:
    for x, y in loader:  # the cause
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        more = clock.step()
        if not more:
            break
