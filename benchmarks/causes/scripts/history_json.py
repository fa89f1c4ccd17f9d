"""After each step, the history of all steps is written as JSON anew. --fixed: a line is appended."""

import json
import os
import tempfile
import time
from pathlib import Path

import torch
from clock import FIXED, Clock
from torch import nn


class Status:
    """Keeps what a run has done where another program can read it."""

    def __init__(self, folder):
        self.path = Path(folder) / "status.json"
        self.lines = (Path(folder) / "history.jsonl").open("a")
        self.events = []

    def write(self, phase, **metrics):
        event = {"phase": phase, "time": time.time(), **metrics}
        if FIXED:
            self.lines.write(json.dumps(event) + "\n")
            return
        self.events.append(event)
        temporary = self.path.with_suffix(".tmp")
        with temporary.open("w") as file:
            json.dump({"phase": phase, "history": self.events}, file, indent=2, sort_keys=True)  # the cause
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)

    def close(self):
        self.lines.close()


class Forecaster(nn.Module):
    """The next day of a field, from the days before."""

    def __init__(self, days=4, width=16):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(days, width, 3, padding=1, padding_mode="circular"),
            nn.GELU(),
            nn.Conv2d(width, width, 3, padding=1, padding_mode="circular"),
            nn.GELU(),
            nn.Conv2d(width, 1, 1),
        )

    def forward(self, x):
        return x[:, -1:] + self.layers(x)


class Trainer:
    def __init__(self, model, status, batch_size=8):
        self.model, self.status, self.batch_size = model, status, batch_size
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        self.fields = torch.randn(400, 24, 24).cumsum(0) / 20
        self.samples_seen = 0

    def batch(self):
        start = torch.randint(0, len(self.fields) - 5, (self.batch_size,))
        days = self.fields[start[:, None] + torch.arange(5)]
        return days[:, :4], days[:, 4:]

    def train_step(self):
        began = time.perf_counter()
        x, y = self.batch()
        loaded = time.perf_counter()
        loss = nn.functional.mse_loss(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.samples_seen += len(x)
        self.status.write(
            "train",
            loss=loss.item(),
            gradient_norm=norm.item(),
            samples_seen=self.samples_seen,
            learning_rate=self.optimizer.param_groups[0]["lr"],
            load_seconds=loaded - began,
            step_seconds=time.perf_counter() - began,
        )

    def fit(self, steps):
        clock = Clock(steps)
        self.train_step()
        while clock.step():
            self.train_step()


with tempfile.TemporaryDirectory() as folder:
    status = Status(folder)
    Trainer(Forecaster(), status).fit(700)
    status.close()
