"""A small vision transformer learns from a large one, and from labels. --fixed: the teacher's forward in no_grad."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from clock import Clock, options
from timm import create_model
from torch import Tensor

args = options(steps=80)
batch, size, heat = (2, 32, 4.0) if args.tiny else (96, 224, 4.0)
names = (
    ("vit_tiny_patch16_224", "vit_tiny_patch16_224") if args.tiny else ("vit_small_patch16_224", "vit_base_patch16_224")
)
student, teacher = (create_model(name, num_classes=100, img_size=size).to(args.device) for name in names)
teacher.eval()
images = [torch.randn(batch, 3, size, size, device=args.device) for _ in range(4)]
labels = torch.randint(100, (batch,), device=args.device)
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4, weight_decay=0.05, fused=True)


def distillation_loss(scores: Tensor, wanted: Tensor) -> Tensor:
    soft = F.log_softmax(scores / heat, 1)
    soft_wanted = F.log_softmax(wanted / heat, 1)
    return F.kl_div(soft, soft_wanted, reduction="batchmean", log_target=True) * heat**2


def train_step(images: Tensor, labels: Tensor) -> Tensor:
    with torch.autocast(args.device, torch.bfloat16):
        with torch.no_grad() if args.fixed else nullcontext():  # the cause
            wanted = teacher(images)  # the cause
        scores = student(images)
        loss = 0.5 * F.cross_entropy(scores, labels) + 0.5 * distillation_loss(scores, wanted)
    optimizer.zero_grad()
    loss.backward()  # the cause
    optimizer.step()
    return loss.detach()


clock = Clock(args)
step = 0
while True:
    loss = train_step(images[step % len(images)], labels)
    step += 1
    if not clock.step():
        break
