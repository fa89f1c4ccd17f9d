"""Forecasts the electric load of a region a day ahead from a week of it and the calendar."""

import argparse
import io
import time

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


def make_csv(hours=24 * 400, columns=6):
    """A csv such as the grid operator publishes: a column of dates, and the load of each region."""
    stamps = pd.date_range("2021-01-01", periods=hours, freq="h")
    rng = np.random.default_rng(0)
    daily = np.sin(2 * np.pi * (stamps.hour.to_numpy()[:, None] / 24 + rng.random(columns)))
    weekly = -0.4 * (stamps.dayofweek.to_numpy()[:, None] >= 5)
    frame = pd.DataFrame(daily + weekly + 0.1 * rng.normal(size=(hours, columns)))
    frame.columns = [f"region_{c}" for c in range(columns)]
    frame.insert(0, "date", stamps.strftime("%Y-%m-%d %H:%M:%S"))
    return frame.to_csv(index=False)


def calendar(dates):
    """Hour, weekday, day of month and day of year, each between -0.5 and 0.5."""
    stamps = pd.DatetimeIndex(pd.to_datetime(dates))  # the cause
    features = [stamps.hour / 23, stamps.dayofweek / 6, (stamps.day - 1) / 30, (stamps.dayofyear - 1) / 365]
    return np.stack([np.asarray(f, dtype=np.float32) for f in features], 1) - 0.5


class LoadDataset(Dataset):
    def __init__(self, csv, seq_len, pred_len, fixed):
        table = pd.read_csv(io.StringIO(csv))
        values = table.drop(columns="date").to_numpy(dtype=np.float32)
        self.values = (values - values.mean(0)) / values.std(0)
        self.dates = table["date"]
        self.marks = calendar(self.dates) if fixed else None
        self.seq_len, self.pred_len = seq_len, pred_len

    def __len__(self):
        return len(self.values) - self.seq_len - self.pred_len + 1

    def __getitem__(self, start):
        middle, end = start + self.seq_len, start + self.seq_len + self.pred_len
        marks = calendar(self.dates[start:end]) if self.marks is None else self.marks[start:end]  # the cause
        return self.values[start:middle], marks, self.values[middle:end]


class Forecaster(nn.Module):
    """Tokens of the past and of the days to come, mixed by a small encoder."""

    def __init__(self, columns, seq_len, pred_len, width=48, patch=12):
        super().__init__()
        self.pred_len, self.patch = pred_len, patch
        self.past = nn.Linear(columns * patch, width)
        self.time = nn.Linear(4 * patch, width)
        self.position = nn.Parameter(0.02 * torch.randn((seq_len + pred_len) // patch, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, columns * patch)

    def forward(self, past, marks):
        batch, _, columns = past.shape
        tokens = self.time(marks.reshape(batch, -1, 4 * self.patch)) + self.position
        seen = self.past(past.reshape(batch, -1, columns * self.patch))
        tokens = tokens + nn.functional.pad(seen, (0, 0, 0, tokens.shape[1] - seen.shape[1]))
        coming = self.encoder(tokens)[:, seen.shape[1] :]
        return self.head(coming).reshape(batch, self.pred_len, columns)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seq_len", type=int, default=168)
    parser.add_argument("--pred_len", type=int, default=24)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(1)
    dataset = LoadDataset(make_csv(), args.seq_len, args.pred_len, args.fixed)
    loader = DataLoader(dataset, args.batch_size, shuffle=True, drop_last=True)
    model = Forecaster(dataset.values.shape[1], args.seq_len, args.pred_len)
    optimizer = torch.optim.Adam(model.parameters(), args.learning_rate)
    losses, began = [], time.perf_counter()
    for step, (past, marks, future) in zip(range(1, args.steps + 1), loader):
        optimizer.zero_grad()
        loss = nn.functional.l1_loss(model(past, marks), future)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 0:
            print(f"iters {step} loss {np.mean(losses[-50:]):.5f}", flush=True)
    print(f"{(time.perf_counter() - began) / args.steps * 1e3:.2f} ms per step")


if __name__ == "__main__":
    main()
