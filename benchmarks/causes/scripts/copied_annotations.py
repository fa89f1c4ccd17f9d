"""A sample's annotations are copied with all their lists, and are then only read. --fixed: the dict alone is copied."""

import copy

import torch
from clock import FIXED, Clock
from torch.utils.data import DataLoader, Dataset


def annotation(n):
    """Make the outlines of thirty objects, as lists of coordinates."""
    outlines = [[[float((n * m + 3 * k) % 48), float((n + m * k) % 48)] for k in range(24)] for m in range(30)]
    return {"id": n, "size": [48, 48], "outlines": outlines}


class Annotated(Dataset):
    def __init__(self):
        self.annotations = [annotation(n) for n in range(300)]
        self.images = torch.rand(300, 3, 48, 48)

    def __len__(self):
        return 100 * len(self.annotations)

    def __getitem__(self, index):
        record = self.annotations[index % 300]
        record = dict(record) if FIXED else copy.deepcopy(record)  # the cause
        record["image"] = self.images[index % 300]
        points = [outline[0] for outline in record["outlines"]]
        return record["image"], torch.tensor(points).mean(0) / 48


model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 24, 3, padding=1, stride=2), torch.nn.ReLU(), torch.nn.Conv2d(24, 48, 3, stride=2),
    torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(48, 2),
)  # fmt: skip
optimizer = torch.optim.Adam(model.parameters())
clock = Clock(300)
for x, y in DataLoader(Annotated(), batch_size=12, shuffle=True):
    loss = torch.nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
