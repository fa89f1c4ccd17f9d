"""Batches of 200 MB from workers, copied from pageable memory. --fixed: pinned, which takes as long elsewhere."""

import torch
from clock import Clock, options
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

args = options(steps=60)
on_gpu = args.device == "cuda"
batch, size = (4, 32) if args.tiny else (48, 102)


class Volumes(Dataset[tuple[Tensor, float]]):
    def __init__(self) -> None:
        self.base = torch.randn(1, size, size, size)

    def __len__(self) -> int:
        return batch * (args.steps + 1)

    def __getitem__(self, number: int) -> tuple[Tensor, float]:
        return self.base * (1 + number % 7), float(number % 7)


loader = DataLoader(
    Volumes(),
    batch,
    num_workers=1 if args.tiny else 12,
    pin_memory=args.fixed and on_gpu,
)
model = nn.Sequential(
    nn.Conv3d(1, 32, 6, 3), nn.GELU(), nn.Conv3d(32, 64, 4, 2), nn.GELU(), nn.AdaptiveAvgPool3d(1), nn.Flatten()
)
model.append(nn.Linear(64, 1)).to(args.device)
optimizer = torch.optim.Adam(model.parameters())
clock = Clock(args)
for volumes, sizes in loader:
    volumes = volumes.to(args.device, non_blocking=args.fixed)  # the cause
    sizes = sizes.to(args.device, torch.float32, non_blocking=args.fixed)
    with torch.autocast(args.device, torch.bfloat16):
        loss = (model(volumes).squeeze(1) - sizes).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
