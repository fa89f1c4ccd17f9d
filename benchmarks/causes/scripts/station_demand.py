"""Forecasts the demand at bicycle stations from windows of their history. --fixed: the remedy."""

import numpy as np
import pandas as pd
import torch
from clock import FIXED, Clock
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STATIONS, HOURS, WINDOW, HORIZON, BATCH, STEPS = 40, 1200, 48, 6, 128, 100
COLUMNS = ["rides", "temperature", "rain", "hour_sin", "hour_cos"]


def history(seed=0):
    rng = np.random.default_rng(seed)
    hour = np.arange(HOURS)
    frames = []
    for station in range(STATIONS):
        daily = np.sin(hour * 2 * np.pi / 24 - rng.uniform(0, 3))
        frames.append(
            pd.DataFrame(
                {
                    "station": station,
                    "time": pd.Timestamp("2024-03-01") + pd.to_timedelta(hour, unit="h"),
                    "rides": daily + 0.2 * rng.normal(size=HOURS),
                    "temperature": 0.5 * daily + 0.1 * rng.normal(size=HOURS),
                    "rain": rng.random(HOURS) < 0.1,
                    "hour_sin": np.sin(hour * 2 * np.pi / 24),
                    "hour_cos": np.cos(hour * 2 * np.pi / 24),
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


class SlidingWindow:
    """Cuts the panel into (history, demand after it), station by station."""

    def __init__(self, window, horizon):
        self.window, self.horizon = window, horizon

    def each(self, table):
        for start in range(len(table) - self.window - self.horizon + 1):
            middle = start + self.window
            past = table.iloc[start:middle][COLUMNS].to_numpy(np.float32)  # the cause
            future = table["rides"].iloc[middle : middle + self.horizon].to_numpy(np.float32)  # the cause
            yield past, future

    def views(self, table):
        values = table[COLUMNS].to_numpy(np.float32)
        spans = np.lib.stride_tricks.sliding_window_view(values, self.window + self.horizon, axis=0)
        return spans[:, :, : self.window].transpose(0, 2, 1), spans[:, 0, self.window :]

    def __call__(self, panel):
        pasts, futures = [], []
        for _, table in panel.groupby("station"):
            if FIXED:
                past, future = self.views(table)
                pasts.append(past)
                futures.append(future)
                continue
            for past, future in self.each(table):
                pasts.append(past[None])
                futures.append(future[None])
        return torch.from_numpy(np.concatenate(pasts)), torch.from_numpy(np.concatenate(futures))


class Demand(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.recurrent = nn.GRU(len(COLUMNS), width, batch_first=True)
        self.head = nn.Linear(width, HORIZON)

    def forward(self, past):
        return self.head(self.recurrent(past)[1][-1])


def main():
    data = TensorDataset(*SlidingWindow(WINDOW, HORIZON)(history().sort_values(["station", "time"])))
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(data, BATCH, shuffle=True, num_workers=1, generator=order)
    model = Demand()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)
    clock = Clock(STEPS, warm=0)
    for past, future in loader:
        loss = nn.functional.huber_loss(model(past), future)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not clock.step():
            break
    print(f"loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
