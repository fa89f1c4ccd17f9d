"""Patch transformer that forecasts the power of wind turbines, from a memory-mapped table of their history."""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

TURBINES, HOURS, PAST, AHEAD, PATCH, BATCH = 24, 6000, 256, 24, 16, 96


def write_history(path, seed=0):
    rng = np.random.default_rng(seed)
    hour = np.arange(HOURS, dtype=np.float32)
    wind = 8 + 3 * np.sin(hour * 2 * np.pi / 24 + rng.uniform(0, 6, (TURBINES, 1))) + rng.normal(size=(TURBINES, HOURS))
    np.save(path, np.clip(wind / 12, 0, 1.0).astype(np.float32) ** 3)


class Windows(Dataset):
    """Answers a list of window numbers with one batch: (history, what came after it)."""

    def __init__(self, path):
        self.power = np.load(path, mmap_mode="r")
        self.each = HOURS - PAST - AHEAD + 1
        self.offsets = np.arange(PAST + AHEAD)

    def __len__(self):
        return TURBINES * self.each

    def __getitem__(self, numbers):
        turbine, first = np.divmod(np.asarray(numbers), self.each)
        spans = torch.from_numpy(self.power[turbine[:, None], first[:, None] + self.offsets])
        return spans[:, :PAST], spans[:, PAST:]


class PatchForecaster(nn.Module):
    def __init__(self, width=64, depth=2):
        super().__init__()
        self.embed = nn.Linear(PATCH, width)
        self.place = nn.Parameter(0.02 * torch.randn(PAST // PATCH, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(PAST // PATCH * width, AHEAD)

    def forward(self, past):
        mean, std = past.mean(1, keepdim=True), past.std(1, keepdim=True) + 1e-3
        x = ((past - mean) / std).unflatten(1, (-1, PATCH))
        return self.head(self.encoder(self.embed(x) + self.place).flatten(1)) * std + mean


class Forecasting:
    def __init__(self, path, steps):
        self.steps = steps
        data, order = Windows(path), torch.Generator().manual_seed(0)
        batches = BatchSampler(RandomSampler(data, generator=order), BATCH, drop_last=True)
        self.loader = DataLoader(data, sampler=batches, batch_size=None)
        generator = np.random.default_rng(1)
        self.held_out = data[generator.integers(len(data), size=256)]
        self.model = PatchForecaster()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 2e-3, total_steps=steps + 1)

    def validate(self):
        self.model.eval()
        with torch.inference_mode():
            error = (self.model(self.held_out[0]) - self.held_out[1]).abs().mean().item()
        self.model.train()
        return error

    def run(self):
        total = torch.zeros(())
        for step, (past, future) in zip(range(self.steps), self.loader):
            if step == 10:
                start = time.perf_counter()
            loss = nn.functional.huber_loss(self.model(past), future)
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            total += loss.detach()
            if (step + 1) % 100 == 0:
                print(f"step {step + 1}: loss {total.item() / 100:.5f} error {self.validate():.4f}")
                total.zero_()
        print(f"{(time.perf_counter() - start) / (self.steps - 10) * 1e3:.2f} ms per step")
        print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        write_history(Path(folder) / "power.npy")
        Forecasting(Path(folder) / "power.npy", options.steps).run()
