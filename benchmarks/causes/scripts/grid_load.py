"""Forecasts the electric load of many households a day ahead, from the past week and the calendar."""

import argparse
import time

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

CALENDAR = {
    "minute": lambda t: (t.hour * 60 + t.minute) / 1439,
    "weekday": lambda t: t.day_of_week / 6,
    "day": lambda t: (t.day - 1) / 30,
    "season": lambda t: (t.day_of_year - 1) / 365,
    "month_end": lambda t: t.is_month_end.astype(float),
}


def calendar_features(index):
    """The calendar of a DatetimeIndex as an array (time, features) about zero."""
    return np.stack([np.asarray(f(index), dtype=np.float32) - 0.5 for f in CALENDAR.values()], axis=1)


def simulate(households, days, freq, seed=0):
    rng = np.random.default_rng(seed)
    index = pd.date_range("2024-01-01", periods=days * 48, freq=freq)
    daily = np.sin(2 * np.pi * (np.arange(len(index))[:, None] / 48 + rng.random(households)))
    weekly = 0.4 * (index.day_of_week.to_numpy()[:, None] >= 5)
    load = 2 + daily + weekly + 0.2 * rng.normal(size=(len(index), households))
    return pd.DataFrame(load.astype(np.float32), index=index)


class Windows(Dataset):
    def __init__(self, table, past, ahead, fixed):
        self.past, self.ahead, self.freq, self.start = past, ahead, table.index.freq, table.index[0]
        values = table.to_numpy()
        self.mean, self.std = values.mean(0), values.std(0)
        self.values = (values - self.mean) / self.std
        self.per_household = len(table) - past - ahead + 1
        self.calendar = calendar_features(table.index) if fixed else None

    def __len__(self):
        return self.per_household * self.values.shape[1]

    def known(self, first):
        length = self.past + self.ahead
        if self.calendar is not None:
            return self.calendar[first : first + length]
        times = pd.date_range(self.start + first * self.freq, periods=length, freq=self.freq)  # the cause
        return calendar_features(times)  # the cause

    def __getitem__(self, index):
        household, first = divmod(index, self.per_household)
        middle = first + self.past
        series = self.values[first : middle + self.ahead, household]
        return {
            "past": torch.from_numpy(series[: self.past].copy()),
            "future": torch.from_numpy(series[self.past :].copy()),
            "known": torch.from_numpy(self.known(first)),
            "household": household,
        }


class Forecaster(nn.Module):
    def __init__(self, households, past, ahead, known, width=48):
        super().__init__()
        self.past = past
        self.who = nn.Embedding(households, 8)
        self.encode = nn.Sequential(nn.Conv1d(1 + known, width, 9, stride=4), nn.ReLU(), nn.Conv1d(width, width, 9, 4))
        self.context = nn.Linear(width + 8, width)
        self.decode = nn.Sequential(nn.Linear(width + known, width), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, batch):
        past, known = batch["past"], batch["known"]
        inputs = torch.cat([past.unsqueeze(2), known[:, : self.past]], dim=2).transpose(1, 2)
        context = self.encode(inputs).relu().mean(2)
        context = self.context(torch.cat([context, self.who(batch["household"])], dim=1))
        future = known[:, self.past :]
        context = context.unsqueeze(1).expand(-1, future.shape[1], -1)
        return self.decode(torch.cat([context, future], dim=2))


def pinball(forecast, truth, quantiles=torch.tensor([0.1, 0.5, 0.9])):
    error = truth.unsqueeze(2) - forecast
    return torch.maximum(quantiles * error, (quantiles - 1) * error).mean()


def main(args):
    table = simulate(args.households, days=60, freq="30min")
    data = Windows(table, past=336, ahead=48, fixed=args.fixed)
    sampler = torch.utils.data.RandomSampler(data, num_samples=args.steps * args.batch)
    loader = DataLoader(data, args.batch, sampler=sampler, num_workers=1, drop_last=True)
    model = Forecaster(args.households, data.past, data.ahead, len(CALENDAR))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, args.steps)
    total, began = torch.zeros(()), time.perf_counter()
    for step, batch in enumerate(loader, 1):
        loss = pinball(model(batch), batch["future"])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        total += loss.detach()
        if step % 25 == 0:
            print(f"step {step} pinball {total.item() / 25:.4f}", flush=True)
            total.zero_()
    print(f"{(time.perf_counter() - began) / step * 1e3:.2f} ms per step")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--households", type=int, default=40)
    parser.add_argument("--fixed", action="store_true")
    torch.manual_seed(0)
    main(parser.parse_args())
