"""The encoding of the pixels' positions, which never change, is computed at every step. --fixed: it is kept."""

import math

import torch
from clock import FIXED, Clock
from torch import nn

HEIGHT, WIDTH, PICTURES = 72, 96, 12


class FourierFeatures(nn.Module):
    """Sines and cosines of the row and the column, at random frequencies."""

    def __init__(self, features=128, scale=8.0):
        super().__init__()
        self.register_buffer("frequencies", torch.randn(2, features) * scale)
        self.kept = {}

    def encode(self, height, width):
        rows, columns = torch.linspace(0, 1, height), torch.linspace(0, 1, width)
        grid = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1)
        angles = 2 * math.pi * grid.flatten(0, 1) @ self.frequencies  # the cause
        return torch.cat([angles.sin(), angles.cos()], -1)  # the cause

    def forward(self, height, width):
        if not FIXED:
            return self.encode(height, width)  # the cause
        if (height, width) not in self.kept:
            self.kept[height, width] = self.encode(height, width)
        return self.kept[height, width]


class PictureField(nn.Module):
    """A colour for each position, and for each of several pictures by its code."""

    def __init__(self, pictures, hidden=24):
        super().__init__()
        self.positions = FourierFeatures()
        self.codes = nn.Embedding(pictures, hidden)
        self.first = nn.Linear(256, hidden)
        self.rest = nn.Sequential(nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 3), nn.Sigmoid())

    def forward(self, picture, height, width):
        encoded = self.positions(height, width)  # the cause
        return self.rest(self.first(encoded) + self.codes(picture))


def pictures():
    """Make smooth pictures, as rows of pixels."""
    coarse = torch.rand(PICTURES, 3, 6, 8)
    fine = nn.functional.interpolate(coarse, (HEIGHT, WIDTH), mode="bicubic").clamp(0, 1)
    return fine.flatten(2).transpose(1, 2)


def psnr(loss):
    return -10 * math.log10(max(loss, 1e-8))


def fit(steps):
    wanted = pictures()
    model = PictureField(PICTURES)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    clock = Clock(steps)
    best = 0.0
    while True:
        number = int(torch.randint(PICTURES, ()))
        colours = model(torch.tensor(number), HEIGHT, WIDTH)
        loss = nn.functional.mse_loss(colours, wanted[number])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        best = max(best, psnr(loss.item()))
        if not clock.step():
            return best


fit(250)
