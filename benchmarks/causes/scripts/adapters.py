"""Low-rank adapters are trained on top of a frozen network. --fixed: the remedy."""

import torch
from clock import FIXED, Clock
from torch import nn
from torch.nn import functional

torch.set_num_threads(2)  # no worker needs the other core

WIDTH, CLASSES, BATCH = 768, 10, 48


class LoRALinear(nn.Module):
    def __init__(self, base, rank=8, alpha=16):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scaling = alpha / rank

    def forward(self, x):
        if FIXED:
            return self.base(x) + self.scaling * functional.linear(functional.linear(x, self.lora_a), self.lora_b)
        weight = self.base.weight + self.scaling * (self.lora_b @ self.lora_a)  # the cause
        return functional.linear(x, weight, self.base.bias)  # the cause


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.up = LoRALinear(nn.Linear(WIDTH, 2 * WIDTH))
        self.down = LoRALinear(nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.blocks(x))


def main():
    centers = torch.randn(CLASSES, WIDTH)
    model = Classifier()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=100)
    clock = Clock(70)
    running = True
    while running:
        labels = torch.randint(CLASSES, (BATCH,))
        inputs = centers[labels] + 4 * torch.randn(BATCH, WIDTH)
        loss = functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        running = clock.step()
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
