"""timm's ViT-B on pictures from a loader. There is nothing to fix: --fixed changes nothing."""

import torch
import torch.nn.functional as F
from clock import Clock, options
from timm import create_model
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

args = options(steps=100)
on_gpu = args.device == "cuda"
torch.set_float32_matmul_precision("high")
batch, size, workers = (2, 32, 1) if args.tiny else (128, 224, 8)
name = "vit_tiny_patch16_224" if args.tiny else "vit_base_patch16_224"


class Pictures(Dataset[tuple[Tensor, int]]):
    """Pictures as bytes, decoded before the training."""

    def __init__(self) -> None:
        self.pixels = torch.randint(256, (512, 3, size, size), dtype=torch.uint8)

    def __len__(self) -> int:
        return batch * (args.steps + 1)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        pixels = self.pixels[number % len(self.pixels)]
        return pixels.flip(2) if number % 2 else pixels, number % 100


loader = DataLoader(
    Pictures(), batch, shuffle=True, num_workers=workers, pin_memory=on_gpu, persistent_workers=True, drop_last=True
)
model = create_model(name, num_classes=100, img_size=size, drop_path_rate=0.1).to(args.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.05, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
mean = torch.tensor([0.485, 0.456, 0.406], device=args.device).view(3, 1, 1) * 255
deviation = torch.tensor([0.229, 0.224, 0.225], device=args.device).view(3, 1, 1) * 255
clock = Clock(args)
total = torch.zeros((), device=args.device)
for step, (images, labels) in enumerate(loader):
    images = images.to(args.device, non_blocking=True)
    labels = labels.to(args.device, non_blocking=True)
    with torch.autocast(args.device, torch.bfloat16):
        scores = model((images - mean) / deviation)
        loss = F.cross_entropy(scores, labels, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    total += loss.detach()
    if step % 50 == 49:
        print(f"step {step + 1} loss {total.item() / 50:.3f}", flush=True)
        total.zero_()
    if not clock.step():
        break
