"""Validation takes one image at a time, and longer than the epoch. --fixed: as many as training, and more."""

import torch
from clock import FIXED, Clock
from torch.utils.data import DataLoader, TensorDataset

images, labels = torch.rand(800, 3, 12, 12), torch.randint(6, (800,))
loader = DataLoader(TensorDataset(images[:320], labels[:320]), batch_size=16, shuffle=True)
held_out = DataLoader(TensorDataset(images[320:], labels[320:]), batch_size=80 if FIXED else 1)  # the cause
layers = [torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU()]
for _ in range(6):
    layers += [torch.nn.Conv2d(16, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU()]
model = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(16, 6))
optimizer = torch.optim.Adam(model.parameters())
clock = Clock(300, warm=21)
more = True
while more:
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        more = clock.step()
        if not more:
            break
    model.eval()
    right = 0
    with torch.no_grad():
        for x, y in held_out:  # the cause
            right += int((model(x).argmax(1) == y).sum())  # the cause
    model.train()
