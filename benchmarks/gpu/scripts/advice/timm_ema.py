"""timm's recipe: EfficientNet, mixup, and an average of its weights, tensor by tensor. --fixed: of all at once."""

import torch
from clock import Clock, options
from timm import create_model
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.utils import ModelEmaV2, ModelEmaV3

args = options(steps=70)
batch, size = (2, 32) if args.tiny else (64, 160)
model = create_model("test_efficientnet" if args.tiny else "efficientnet_b0", num_classes=100)
model.to(args.device, memory_format=torch.channels_last)
average = ModelEmaV3(model, 0.999, foreach=True) if args.fixed else ModelEmaV2(model, 0.999)
mixup = Mixup(0.8, label_smoothing=0.1, num_classes=100)
loss_of = SoftTargetCrossEntropy()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
images = torch.randn(batch, 3, size, size, device=args.device).to(memory_format=torch.channels_last)
labels = torch.randint(100, (batch,), device=args.device)
clock = Clock(args)
while True:
    mixed, targets = mixup(images.clone(), labels)
    with torch.autocast(args.device, torch.bfloat16):
        loss = loss_of(model(mixed), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average.update(model)  # the cause
    if not clock.step():
        break
