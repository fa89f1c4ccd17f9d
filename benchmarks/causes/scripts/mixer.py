"""An MLP-Mixer classifies pictures and reports on its gradients now and then. --fixed: the remedy."""

import torch
from clock import FIXED, Clock
from torch import nn

SIDE, PATCH, WIDTH, DEPTH, CLASSES, BATCH = 32, 8, 128, 4, 10, 32
LOG_EVERY = 40


class MixerBlock(nn.Module):
    def __init__(self, tokens):
        super().__init__()
        self.norm_tokens, self.norm_channels = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.tokens = nn.Sequential(nn.Linear(tokens, 32), nn.GELU(), nn.Linear(32, tokens))
        self.channels = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.tokens(self.norm_tokens(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm_channels(x))


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.blocks = nn.Sequential(*(MixerBlock((SIDE // PATCH) ** 2) for _ in range(DEPTH)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(self.blocks(x).mean(1))


class GradientReport:
    """Per-layer size of the gradients: their norm, median and 95th percentile, and how many are near zero."""

    def __init__(self, every):
        self.every = every
        self.step = 0

    def measure(self, model):
        rows = {}
        for name, parameter in model.named_parameters():
            size = parameter.grad.abs().flatten()  # the cause
            middle, high = torch.quantile(size, torch.tensor([0.5, 0.95])).tolist()  # the cause
            small = (size < 1e-7).float().mean().item()  # the cause
            rows[name] = parameter.grad.norm().item(), middle, high, small  # the cause
        return rows

    def __call__(self, model):
        self.step += 1
        due = self.step % self.every == 0
        if FIXED and not due:
            return
        rows = self.measure(model)  # the cause
        if due:
            name = max(rows, key=lambda key: rows[key][0])
            print(f"step {self.step}: largest gradient {rows[name][0]:.4f} at {name}")


templates = torch.rand(CLASSES, 3, SIDE, SIDE)
model = Mixer()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
report = GradientReport(LOG_EVERY)
clock = Clock(80)
running = True
while running:
    labels = torch.randint(CLASSES, (BATCH,))
    loss = nn.functional.cross_entropy(model(templates[labels] + torch.randn(BATCH, 3, SIDE, SIDE)), labels)
    optimizer.zero_grad()
    loss.backward()
    report(model)
    optimizer.step()
    running = clock.step()
print(f"loss {loss.item():.4f}")
