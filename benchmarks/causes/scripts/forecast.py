"""Residual blocks forecast load curves; the state of training is kept on disk. --fixed: the remedy."""

import math
import tempfile
from pathlib import Path

import torch
from clock import FIXED, Clock
from torch import nn

SERIES, HISTORY, HORIZON, BATCH, STEPS = 200, 48, 12, 32, 80
SAVE_EVERY = 50 if FIXED else 1  # the cause


class Block(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(HISTORY, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.backcast, self.forecast = nn.Linear(width, HISTORY), nn.Linear(width, HORIZON)

    def forward(self, x):
        hidden = self.layers(x)
        return x - self.backcast(hidden), self.forecast(hidden)


class Forecaster(nn.Module):
    def __init__(self, blocks=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, history):
        total = 0
        for block in self.blocks:
            history, forecast = block(history)
            total = total + forecast
        return total


class Checkpointer:
    """Writes what a run needs to go on; a file is replaced only by a whole one."""

    def __init__(self, folder, every):
        self.folder, self.every = folder, every

    def __call__(self, step, model, optimizer, loss):
        if step % self.every:
            return
        state = {"step": step, "loss": loss.item(), "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        partial = self.folder / "last.pt.partial"
        torch.save(state, partial)  # the cause
        partial.replace(self.folder / "last.pt")


def curves(hours=600):
    t = torch.arange(hours) * 2 * math.pi / 24
    phase, scale = torch.rand(SERIES, 1) * 6, torch.rand(SERIES, 1) + 0.5
    return scale * torch.sin(t + phase) + 0.1 * torch.randn(SERIES, hours)


def windows(data):
    while True:
        series = torch.randint(SERIES, (BATCH,))
        begin = torch.randint(data.shape[1] - HISTORY - HORIZON, (BATCH, 1))
        rows = data[series[:, None], begin + torch.arange(HISTORY + HORIZON)]
        yield rows[:, :HISTORY], rows[:, HISTORY:]


model = Forecaster()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
clock = Clock(STEPS)
with tempfile.TemporaryDirectory() as name:
    checkpoint = Checkpointer(Path(name), SAVE_EVERY)
    for step, (history, future) in enumerate(windows(curves()), 1):
        loss = nn.functional.smooth_l1_loss(model(history), future)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        checkpoint(step, model, optimizer, loss)  # the cause
        if not clock.step():
            break
print(f"loss {loss.item():.5f}")
