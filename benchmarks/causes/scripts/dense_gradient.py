"""The gradient of a large embedding is dense, though a batch uses few of its rows. --fixed: sparse."""

import torch
from clock import FIXED, Clock

embedding = torch.nn.Embedding(120_000, 64, sparse=FIXED)  # the cause
recurrent, head = torch.nn.GRU(64, 64, batch_first=True), torch.nn.Linear(64, 2)
optimizer = torch.optim.SGD([*embedding.parameters(), *recurrent.parameters(), *head.parameters()], lr=0.1)
clock = Clock(250)
while True:
    x, y = torch.randint(120_000, (16, 30)), torch.randint(2, (16,))
    loss = torch.nn.functional.cross_entropy(head(recurrent(embedding(x))[0][:, -1]), y)
    optimizer.zero_grad()
    loss.backward()  # the cause
    optimizer.step()  # the cause
    if not clock.step():
        break
