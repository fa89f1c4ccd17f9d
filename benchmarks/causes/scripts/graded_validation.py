"""Validation keeps its predictions, and with them what gradients would need. --fixed: without gradients."""

import contextlib

import torch
from clock import FIXED, Clock
from torch.utils.data import DataLoader, TensorDataset

images, labels = torch.rand(1200, 16, 32, 32), torch.randint(6, (1200,))
loader = DataLoader(TensorDataset(images[:240], labels[:240]), batch_size=24, shuffle=True)
held_out = DataLoader(TensorDataset(images[240:], labels[240:]), batch_size=24)
layers = []
for _ in range(6):
    layers += [torch.nn.Conv2d(16, 16, 1), torch.nn.BatchNorm2d(16), torch.nn.ReLU()]
model = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(16, 6))
optimizer = torch.optim.Adam(model.parameters())
clock = Clock(90, warm=11)
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
    outputs = []
    with torch.inference_mode() if FIXED else contextlib.nullcontext():
        for x, _ in held_out:  # the cause
            outputs.append(model(x))  # the cause
    right = int((torch.cat(outputs).argmax(1) == labels[240:]).sum())
    model.train()
