"""Pictures are turned, shifted and dimmed one after the other, on the GPU. --fixed: all at once."""

import torch
import torch.nn.functional as F
from clock import Clock, options
from torch import Tensor
from torchvision import models

args = options(steps=80)
batch, size = (2, 32) if args.tiny else (64, 128)
model = models.resnet18(num_classes=100).to(args.device, memory_format=torch.channels_last)
images = torch.randn(batch, 3, size, size, device=args.device)
labels = torch.randint(100, (batch,), device=args.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def one_by_one(images: Tensor) -> Tensor:
    made = []
    for image in images:  # the cause
        turn, dim = float(torch.rand(()) - 0.5), float(torch.rand(()) + 0.5)  # the cause
        spin = image.new_tensor([[1.0, -turn, turn], [turn, 1.0, -turn]])  # the cause
        grid = F.affine_grid(spin.unsqueeze(0), [1, 3, size, size], align_corners=False)  # the cause
        made.append((F.grid_sample(image.unsqueeze(0), grid, align_corners=False) * dim).clamp(-1, 1))  # the cause
    return torch.cat(made)


def at_once(images: Tensor) -> Tensor:
    turn, dim = torch.rand(2, batch, device=args.device) - 0.5
    one = torch.ones_like(turn)
    spin = torch.stack([torch.stack([one, -turn, turn], 1), torch.stack([turn, one, -turn], 1)], 1)
    grid = F.affine_grid(spin, [batch, 3, size, size], align_corners=False)
    return (F.grid_sample(images, grid, align_corners=False) * (dim + 1).view(-1, 1, 1, 1)).clamp(-1, 1)


changed = at_once if args.fixed else one_by_one
clock = Clock(args)
while True:
    rows = changed(images).to(memory_format=torch.channels_last)  # the cause
    with torch.autocast(args.device, torch.bfloat16):
        loss = F.cross_entropy(model(rows), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
