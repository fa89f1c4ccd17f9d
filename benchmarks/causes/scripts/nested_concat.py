"""Data sets are added one to another, and lie nested hundreds deep. --fixed: ConcatDataset is given all of them."""

import torch
from clock import FIXED, Clock
from torch.utils.data import ConcatDataset, DataLoader, Dataset


class Recording(Dataset):
    def __init__(self, number):
        self.windows = torch.rand(20, 24, 16) + number / 600

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, index):
        return self.windows[index]


recordings = [Recording(number) for number in range(600)]
if FIXED:
    data = ConcatDataset(recordings)
else:
    data = recordings[0]
    for recording in recordings[1:]:
        data = data + recording  # the cause

recurrent, head = torch.nn.GRU(16, 48, batch_first=True), torch.nn.Linear(48, 16)
optimizer = torch.optim.Adam([*recurrent.parameters(), *head.parameters()])
clock = Clock(240)
for x in DataLoader(data, batch_size=50, shuffle=True):  # the cause
    loss = torch.nn.functional.mse_loss(head(recurrent(x[:, :-1])[0]), x[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
