"""ResNet-50 on images that are on the GPU already, in bf16. --fixed: model and images in channels_last."""

import torch
import torch.nn.functional as F
from clock import Clock, options
from torchvision import models

args = options(steps=60)
batch, size = (4, 64) if args.tiny else (96, 224)
layout = torch.channels_last if args.fixed else torch.contiguous_format
model = (models.resnet18 if args.tiny else models.resnet50)(num_classes=200)
model = model.to(args.device, memory_format=layout)  # the cause
images = torch.randn(batch, 3, size, size).to(args.device, memory_format=layout)  # the cause
labels = torch.randint(200, (batch,), device=args.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
clock = Clock(args)
while True:
    with torch.autocast(args.device, torch.bfloat16):
        loss = F.cross_entropy(model(images), labels)  # the cause
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
