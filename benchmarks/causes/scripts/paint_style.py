"""Trains a network that paints photographs in the manner of one picture. --fixed: the remedy."""

import torch
import torch.nn.functional as F
from clock import FIXED, Clock
from torch import nn

SIZE, STYLE_SIZE, BATCH, STEPS = 56, 144, 3, 70
CONTENT_WEIGHT, STYLE_WEIGHT = 1e2, 1e6


class Features(nn.Module):
    """A fixed network in the manner of VGG; gives what its four stages see."""

    def __init__(self, widths=(16, 32, 48, 64)):
        super().__init__()
        stages, inside = [], 3
        for width in widths:
            stages.append(
                nn.Sequential(
                    nn.Conv2d(inside, width, 3, padding=1),
                    nn.ReLU(),
                    nn.Conv2d(width, width, 3, padding=1),
                    nn.ReLU(),
                )
            )
            inside = width
        self.stages, self.pool = nn.ModuleList(stages), nn.AvgPool2d(2)
        self.requires_grad_(False).eval()

    def forward(self, x):
        seen = []
        for number, stage in enumerate(self.stages):
            x = stage(self.pool(x) if number else x)
            seen.append(x)
        return seen


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.InstanceNorm2d(width, affine=True),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.InstanceNorm2d(width, affine=True),
        )

    def forward(self, x):
        return x + self.layers(x)


def painter(width=16):
    return nn.Sequential(
        nn.Conv2d(3, width, 5, padding=2),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.InstanceNorm2d(2 * width, affine=True),
        nn.ReLU(),
        Residual(2 * width),
        Residual(2 * width),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(2 * width, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 3, 5, padding=2),
        nn.Sigmoid(),
    )


def gram(seen):
    flat = seen.flatten(2)
    return flat @ flat.transpose(1, 2) / flat[0].numel()


class PerceptualLoss:
    def __init__(self, features, style):
        self.features, self.style = features, style
        self.targets = self.style_targets(1) if FIXED else None

    @torch.no_grad()
    def style_targets(self, count):
        return [gram(seen) for seen in self.features(self.style.expand(count, -1, -1, -1))]  # the cause

    def __call__(self, painted, photographs):
        with torch.no_grad():
            content = self.features(photographs)[2]
        targets = self.targets or self.style_targets(len(photographs))  # the cause
        seen = self.features(painted)
        style = sum(F.mse_loss(gram(own), target.expand(len(own), -1, -1)) for own, target in zip(seen, targets))
        return CONTENT_WEIGHT * F.mse_loss(seen[2], content) + STYLE_WEIGHT * style


def pictures(count, size):
    coarse = F.interpolate(torch.rand(count, 3, 6, 6), size=size, mode="bicubic")
    return (coarse + 0.1 * torch.randn(count, 3, size, size)).clamp(0, 1)


photographs, style = pictures(60, SIZE), pictures(1, STYLE_SIZE)
criterion, model = PerceptualLoss(Features(), style), painter()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
clock, going = Clock(STEPS), True
while going:
    batch = photographs[torch.randint(len(photographs), (BATCH,))]
    loss = criterion(model(batch), batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    going = clock.step()
print(f"loss {loss.item():.5f}")
