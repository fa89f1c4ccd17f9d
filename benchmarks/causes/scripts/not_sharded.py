"""Every worker delivers all samples. --fixed: each its share. A step is a batch of samples that nobody had before."""

import torch
from clock import FIXED, Clock
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        first, by = (worker.id, worker.num_workers) if FIXED else (0, 1)
        for n in range(first, 10_240, by):  # the cause
            yield n, (torch.arange(4096.0).view(64, 64) + n).cos().matrix_power(9)[0]


model = torch.nn.Linear(64, 64)
optimizer = torch.optim.Adam(model.parameters())
loader = DataLoader(Stream(), batch_size=32, num_workers=4)  # the cause
clock = Clock(320)
seen = set()
more = True
while more:
    for n, x in loader:  # the cause
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if seen.issuperset(n.tolist()):
            continue
        seen.update(n.tolist())
        more = clock.step()
        if not more:
            break
