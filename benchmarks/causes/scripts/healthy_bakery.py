"""Forecasts the daily sales of bakeries with dilated convolutions and quantile loss."""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

QUANTILES = torch.tensor([0.1, 0.5, 0.9])


def simulate(shops, days):
    rng = np.random.default_rng(0)
    day = np.arange(days)
    week = rng.normal(0, 0.3, (shops, 7))[:, day % 7]
    year = 0.3 * np.sin(2 * np.pi * (day / 365 + rng.random((shops, 1))))
    sales = (rng.normal(0, 0.5, (shops, 1)) + week + year + 0.15 * rng.normal(size=(shops, days))).astype(np.float32)
    calendar = np.stack([np.sin(2 * np.pi * day / 7), np.cos(2 * np.pi * day / 7), np.sin(2 * np.pi * day / 365)])
    return torch.from_numpy(sales), torch.from_numpy(calendar.astype(np.float32))


class Windows(Dataset):
    def __init__(self, sales, calendar, past, ahead):
        self.sales, self.calendar, self.past = sales, calendar, past
        self.starts = sales.shape[1] - past - ahead + 1
        self.offsets = torch.arange(past + ahead)

    def __len__(self):
        return len(self.sales) * self.starts

    def __getitem__(self, numbers):
        numbers = torch.as_tensor(numbers)[:, None]
        days = numbers % self.starts + self.offsets
        sales = self.sales[numbers // self.starts, days]
        return sales[:, : self.past], self.calendar[:, days].transpose(0, 1), sales[:, self.past :]


class CausalBlock(nn.Module):
    def __init__(self, width, dilation):
        super().__init__()
        self.conv, self.pad = nn.Conv1d(width, 2 * width, 3, dilation=dilation), 2 * dilation
        self.out = nn.Conv1d(width, width, 1)

    def forward(self, x):
        value, gate = self.conv(F.pad(x, (self.pad, 0))).chunk(2, 1)
        return x + self.out(value.tanh() * gate.sigmoid())


class SalesNet(nn.Module):
    def __init__(self, ahead, width=48):
        super().__init__()
        self.ahead, self.enter = ahead, nn.Conv1d(4, width, 1)
        self.blocks = nn.Sequential(*[CausalBlock(width, 2**i) for i in range(5)])
        self.head = nn.Linear(width, ahead * 3)

    def forward(self, past, calendar):
        x = self.enter(torch.cat([past.unsqueeze(1), calendar[:, :, : past.shape[1]]], 1))
        x = self.blocks(x)[:, :, -1]
        return self.head(x).view(len(past), self.ahead, 3)


def pinball(predicted, true):
    error = true.unsqueeze(-1) - predicted
    return torch.maximum(QUANTILES * error, (QUANTILES - 1) * error).mean()


@torch.no_grad()
def validate(model, loader):
    return np.mean([pinball(model(past, calendar), future).item() for past, calendar, future in loader])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=240)
    args = parser.parse_args()
    torch.manual_seed(0)
    sales, calendar = simulate(60, 900)
    training, held_out = Windows(sales[:52], calendar, 90, 14), Windows(sales[52:], calendar, 90, 14)
    draws = RandomSampler(training, num_samples=args.steps * 64)
    loader = DataLoader(training, sampler=BatchSampler(draws, 64, drop_last=True), batch_size=None)
    validation = DataLoader(held_out, sampler=BatchSampler(range(0, len(held_out), 7), 256, False), batch_size=None)
    model = SalesNet(14)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=args.steps)
    seconds, best = 0.0, float("inf")
    with tempfile.TemporaryDirectory() as folder:
        for step, (past, calendar_part, future) in enumerate(loader, 1):
            began = time.perf_counter()
            loss = pinball(model(past, calendar_part), future)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            seconds += time.perf_counter() - began
            if step % 80 == 0:
                score = validate(model, validation)
                if score < best:
                    torch.save(model.state_dict(), Path(folder) / "best.pt")
                best = min(best, score)
                print(f"step {step} loss {loss.item():.5f} validation {score:.5f}", flush=True)
    print(f"{seconds / args.steps * 1e3:.2f} ms per step")


if __name__ == "__main__":
    main()
