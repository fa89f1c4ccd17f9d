"""All pairs' distances by a difference of every pair's features. --fixed: by a product of matrices (as cdist does)."""

import torch
from clock import FIXED, Clock
from torch import nn


def squared_distances(x, y):
    """Give the squared distance of each frame of x from each of y, of sequences (batch, frames, features)."""
    if FIXED:
        dots = torch.bmm(x, y.transpose(1, 2))
        return (x.square().sum(-1)[:, :, None] + y.square().sum(-1)[:, None, :] - 2 * dots).clamp_min(0)
    n, m, d = x.shape[1], y.shape[1], x.shape[2]
    x = x.unsqueeze(2).expand(-1, n, m, d)  # the cause
    y = y.unsqueeze(1).expand(-1, n, m, d)  # the cause
    return torch.pow(x - y, 2).sum(3)  # the cause


class SoftAlignment(nn.Module):
    """How far two sequences are from each other, if each frame may be matched with a few of the other's."""

    def __init__(self, temperature=0.1):
        super().__init__()
        self.temperature = temperature

    def soft_min(self, distances, dim):
        return -self.temperature * torch.logsumexp(-distances / self.temperature, dim)

    def forward(self, x, y):
        distances = squared_distances(x, y)  # the cause
        return self.soft_min(distances, 1).mean() + self.soft_min(distances, 2).mean()


class Features(nn.Module):
    """Frames of a sensor to features of length one."""

    def __init__(self, channels=6, width=64):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(channels, width, 5, padding=2),
            nn.ReLU(),
            nn.Conv1d(width, width, 5, padding=2, stride=2),
            nn.ReLU(),
            nn.Conv1d(width, width, 1),
        )

    def forward(self, x):
        return nn.functional.normalize(self.layers(x).transpose(1, 2), dim=-1)


def recordings(batch_size, frames=160):
    """Yield pairs of recordings of the same movement, one of them slower."""
    time = torch.linspace(0, 12, frames)
    while True:
        speed = torch.rand(batch_size, 6, 1) + 0.5
        first = torch.sin(time * speed) + 0.1 * torch.randn(batch_size, 6, frames)
        second = torch.sin(time * speed * 0.8) + 0.1 * torch.randn(batch_size, 6, frames)
        yield first, second


def main():
    model, criterion = Features(), SoftAlignment()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    clock = Clock(60)
    for first, second in recordings(batch_size=12):
        x, y = model(first), model(second)
        loss = criterion(x, y) - 0.5 * criterion(x, y.roll(1, 0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not clock.step():
            break


if __name__ == "__main__":
    main()
