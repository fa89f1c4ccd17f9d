"""The model is called a second time in every step, for the accuracy. --fixed: it is taken of the first outputs."""

import torch
from clock import FIXED, Clock

torch.set_num_threads(2)  # no worker needs the other core
embedding = torch.nn.Embedding(2000, 96)
layers = torch.nn.TransformerEncoder(
    torch.nn.TransformerEncoderLayer(96, 4, dim_feedforward=256, dropout=0.0, batch_first=True), 2
)
head = torch.nn.Linear(96, 4)
model = torch.nn.Sequential(embedding, layers, head)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
right = torch.zeros((), dtype=torch.long)
clock = Clock(250)
while True:
    x, y = torch.randint(2000, (16, 48)), torch.randint(4, (16,))
    out = model(x).mean(1)
    loss = torch.nn.functional.cross_entropy(out, y)
    if not FIXED:
        with torch.no_grad():
            out = model(x).mean(1)  # the cause
    right += (out.argmax(1) == y).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
