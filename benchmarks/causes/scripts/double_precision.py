"""The data are what NumPy makes, in double precision, and the model is made to fit. --fixed: single precision."""

import numpy as np
import torch
from clock import FIXED, Clock
from torch.utils.data import DataLoader, Dataset

rng = np.random.default_rng(0)


class Traces(Dataset):
    def __init__(self):
        self.traces = rng.standard_normal((400, 128))
        if FIXED:
            self.traces = self.traces.astype(np.float32)

    def __len__(self):
        return 40_000

    def __getitem__(self, index):
        return torch.from_numpy(self.traces[index % 400])


model = torch.nn.Sequential(
    torch.nn.Linear(128, 768), torch.nn.ReLU(), torch.nn.Linear(768, 768), torch.nn.ReLU(), torch.nn.Linear(768, 128)
)
if not FIXED:
    model = model.double()  # the cause
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
clock = Clock(250)
for x in DataLoader(Traces(), batch_size=128, shuffle=True):
    loss = torch.nn.functional.mse_loss(model(x), x)  # the cause
    optimizer.zero_grad()
    loss.backward()  # the cause
    optimizer.step()
    if not clock.step():
        break
