"""The garbage collector is called after every step, to save memory. --fixed: it is not."""

import gc

import torch
from clock import FIXED, Clock

embedding = torch.nn.Embedding(2000, 128)
layer = torch.nn.TransformerEncoderLayer(128, 4, dim_feedforward=512, dropout=0.0, batch_first=True)
head = torch.nn.Linear(128, 2000)
model = torch.nn.Sequential(embedding, layer, head)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
clock = Clock(60)
while True:
    x = torch.randint(2000, (8, 64))
    loss = torch.nn.functional.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not FIXED:
        gc.collect()  # the cause
    if not clock.step():
        break
