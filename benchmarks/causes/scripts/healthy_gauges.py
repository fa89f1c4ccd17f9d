"""Fills the gaps in the records of tide gauges with dilated convolutions over time."""

import math

import torch
import torch.nn.functional as F
from clock import Clock
from torch import nn

GAUGES, HOURS, LENGTH, BATCH, WIDTH, STEPS, VALIDATE_EVERY = 60, 4000, 384, 16, 48, 110, 50


def records():
    hour = torch.arange(HOURS)
    out = torch.zeros(GAUGES, HOURS)
    for period in (12.42, 12.0, 25.82, 23.93):
        phase, height = torch.rand(GAUGES, 1) * 2 * math.pi, torch.rand(GAUGES, 1)
        out += height * torch.sin(2 * math.pi * hour / period + phase)
    return out + 0.1 * torch.randn(GAUGES, HOURS)


def with_gaps(count):
    """A mask of what was recorded: a stretch of each row is lost."""
    begin = torch.randint(LENGTH - 48, (count, 1))
    length = torch.randint(12, 48, (count, 1))
    place = torch.arange(LENGTH)
    return ((place < begin) | (place >= begin + length)).float()


class Layer(nn.Module):
    def __init__(self, dilation):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, 2 * WIDTH, 3, padding=dilation, dilation=dilation)
        self.out = nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x):
        return x + self.out(F.glu(self.conv(x), dim=1))


class Filler(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Conv1d(2, WIDTH, 5, padding=2)
        self.layers = nn.Sequential(*(Layer(2**n) for n in range(6)))
        self.head = nn.Conv1d(WIDTH, 1, 1)

    def forward(self, level, mask):
        x = torch.stack([level * mask, mask], 1)
        return self.head(F.relu(self.layers(self.inside(x)))).squeeze(1)


def error(predicted, level, mask):
    lost = 1 - mask
    return ((predicted - level) ** 2 * lost).sum() / lost.sum()


def batch(data):
    begin = torch.randint(data.shape[1] - LENGTH, (BATCH, 1))
    rows = torch.randint(len(data), (BATCH, 1))
    return data[rows, begin + torch.arange(LENGTH)], with_gaps(BATCH)


@torch.no_grad()
def validate(model, level, mask):
    model.eval()
    result = error(model(level, mask), level, mask).item()
    model.train()
    return result


data = records()
training, held_out = data[:50], batch(data[50:])
model = Filler()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
clock, step, going = Clock(STEPS), 0, True
while going:
    step += 1
    level, mask = batch(training)
    loss = error(model(level, mask), level, mask)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % VALIDATE_EVERY == 0:
        print(f"{step:4} training {loss.item():.4f} validation {validate(model, *held_out):.4f}")
    going = clock.step()
