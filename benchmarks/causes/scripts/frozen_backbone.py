"""The backbone has gradients, which no optimizer uses: only the head is trained. --fixed: it wants none."""

import torch
from clock import FIXED, Clock

backbone = torch.nn.Sequential(
    torch.nn.Conv2d(3, 24, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(24, 24, 3, padding=1), torch.nn.ReLU(),
    torch.nn.Conv2d(24, 48, 3, stride=2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
).eval()  # fmt: skip
if FIXED:
    backbone.requires_grad_(False)
head = torch.nn.Linear(48, 10)
optimizer = torch.optim.Adam(head.parameters())
clock = Clock(250)
while True:
    x, y = torch.rand(16, 3, 32, 32), torch.randint(10, (16,))
    loss = torch.nn.functional.cross_entropy(head(backbone(x)), y)
    optimizer.zero_grad()
    loss.backward()  # the cause
    optimizer.step()
    if not clock.step():
        break
