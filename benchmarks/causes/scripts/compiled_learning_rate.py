"""A compiled optimizer whose learning rate is another number in every step. --fixed: a tensor."""

import torch
from clock import FIXED, Clock

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1) if FIXED else 0.1)
step = torch.compile(optimizer.step, backend="aot_eager")  # the cause
x = torch.rand(32, 64)
clock = Clock(400, warm=2)
n = 0
while True:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    step()  # the cause
    n += 1
    if FIXED:
        optimizer.param_groups[0]["lr"].fill_(0.1 / (1 + n))
    else:
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + n)  # the cause
    if not clock.step():
        break
