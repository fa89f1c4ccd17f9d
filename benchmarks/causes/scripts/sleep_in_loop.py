"""The training sleeps after every fourth step, since it hung once when it did not. --fixed: it does not sleep."""

import time

import torch
from clock import FIXED, Clock
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.rand(4000, 4, 24, 24), torch.randint(5, (4000,)))
model = torch.nn.Sequential(
    torch.nn.Conv2d(4, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 32, 3, stride=2), torch.nn.ReLU(),
    torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(32, 5),
)  # fmt: skip
optimizer = torch.optim.Adam(model.parameters())
clock = Clock(240)
for step, (x, y) in enumerate(DataLoader(data, batch_size=16, shuffle=True, num_workers=1)):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 3 and not FIXED:
        time.sleep(0.05)  # the cause
    if not clock.step():
        break
