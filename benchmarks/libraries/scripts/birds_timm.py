"""Bird crops with a timm ViT: cross entropy plus a prototype loss on the pooled embedding."""
import time

import timm
import torch
import torch.nn.functional as F
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SPECIES = 20
IMAGE_SIZE = 64
STEPS = 80
WARMUP = 5


class BirdNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = timm.create_model("vit_tiny_patch16_224", img_size=IMAGE_SIZE, patch_size=8,
                                          depth=6, num_classes=SPECIES)
        self.prototypes = nn.Parameter(torch.randn(SPECIES, self.backbone.num_features) * 0.02)

    def embed(self, images):
        tokens = self.backbone.forward_features(images)
        pooled = self.backbone.forward_head(tokens, pre_logits=True)
        return F.normalize(pooled, dim=1)

    def forward(self, images):
        embedding = self.embed(images)
        similarity = embedding @ F.normalize(self.prototypes, dim=1).T
        logits = self.backbone(images)
        return logits, similarity


def make_birds(n, seed=0):
    gen = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, SPECIES, (n,), generator=gen)
    colors = torch.randn(SPECIES, 3, 1, 1, generator=gen)
    images = torch.randn(n, 3, IMAGE_SIZE, IMAGE_SIZE, generator=gen) + colors[labels]
    return TensorDataset(images, labels)


def main():
    torch.manual_seed(0)
    loader = DataLoader(make_birds(STEPS * 12), batch_size=12, shuffle=True)
    model = BirdNet()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=5e-4, weight_decay=0.05)
    scheduler = CosineLRScheduler(optimizer, t_initial=STEPS, warmup_t=10, warmup_lr_init=1e-5,
                                  t_in_epochs=False)

    model.train()
    running = 0.0
    for step, (images, labels) in enumerate(loader):
        if step == WARMUP:
            start = time.perf_counter()
        logits, similarity = model(images)
        loss = F.cross_entropy(logits, labels, label_smoothing=0.1)
        loss = loss + 0.5 * F.cross_entropy(similarity / 0.1, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step_update(step + 1)
        running = 0.9 * running + 0.1 * loss.item() if step else loss.item()
        if step % 20 == 0:
            print(f"step {step:3d} loss {running:.4f}")
    elapsed = time.perf_counter() - start
    print(f"final loss {running:.4f}")
    print(f"{elapsed / (STEPS - WARMUP) * 1000:.1f} ms per step")


if __name__ == "__main__":
    main()
