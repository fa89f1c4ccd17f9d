"""A confusion matrix is kept by NumPy, of each batch. --fixed: on the GPU."""

import numpy as np
import torch
import torch.nn.functional as F
from clock import Clock, options
from torch import nn
from torchvision import models

args = options(steps=80)
batch, size, classes = (2, 32, 10) if args.tiny else (96, 128, 100)
model: nn.Module = models.resnet18(num_classes=classes).to(args.device, memory_format=torch.channels_last)
images = torch.randn(batch, 3, size, size, device=args.device).to(memory_format=torch.channels_last)
labels = torch.randint(classes, (batch,), device=args.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
table = np.zeros((classes, classes), np.int64)
counts = torch.zeros(classes * classes, device=args.device)
clock = Clock(args)
while True:
    with torch.autocast(args.device, torch.bfloat16):
        scores = model(images)
        loss = F.cross_entropy(scores, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if args.fixed:
        counts += torch.bincount(labels * classes + scores.argmax(1), minlength=classes * classes)
    else:
        found = scores.detach().float().cpu().numpy()  # the cause
        chances = np.exp(found) / np.exp(found).sum(1, keepdims=True)  # the cause
        for true, row in zip(labels.cpu().numpy(), chances, strict=True):  # the cause
            table[true, row.argmax()] += 1  # the cause
    if not clock.step():
        break
