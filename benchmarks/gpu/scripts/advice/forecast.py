"""N-BEATS forecasts many series that pandas has read. --fixed: they, and so the model, are float32."""

from itertools import pairwise

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from clock import Clock, options
from torch import Tensor, nn

args = options(steps=100)
torch.set_float32_matmul_precision("high")
width, blocks, batch, past, ahead = (32, 2, 8, 48, 12) if args.tiny else (1024, 8, 12288, 512, 96)


def measurements(columns: int = 64, hours: int = 8000) -> pd.DataFrame:
    """Return the load of each customer, hour by hour."""
    drawn = np.random.default_rng(0)
    hour = np.arange(hours)[:, None]
    daily = np.sin(2 * np.pi * (hour + drawn.integers(0, 24, columns)) / 24)
    weekly = 0.4 * np.sin(2 * np.pi * hour / 168)
    noise = 0.2 * drawn.standard_normal((hours, columns))
    index = pd.date_range("2024-01-01", periods=hours, freq="h")
    return pd.DataFrame(daily + weekly + noise, index=index, columns=[f"mt_{n:03}" for n in range(columns)])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = [past, width, width, width, width]
        layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(sizes)]
        self.layers = nn.Sequential(*layers)
        self.backcast, self.forecast = nn.Linear(width, past), nn.Linear(width, ahead)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.layers(x)
        return self.backcast(hidden), self.forecast(hidden)


class NBeats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        forecast = x.new_zeros(len(x), ahead)
        for block in self.blocks:
            seen, guess = block(x)
            x = x - seen
            forecast = forecast + guess
        return forecast


frame = measurements()
frame = (frame - frame.mean()) / frame.std()
values = frame.to_numpy(np.float32 if args.fixed else None)  # the cause
series = torch.from_numpy(values.T.copy()).to(args.device)
model = NBeats().to(args.device, series.dtype)  # the cause
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
span = torch.arange(past + ahead, device=args.device)
clock = Clock(args)
while True:
    row = torch.randint(series.shape[0], (batch, 1), device=args.device)
    start = torch.randint(series.shape[1] - past - ahead, (batch, 1), device=args.device)
    window = series[row, start + span]
    loss = F.smooth_l1_loss(model(window[:, :past]), window[:, past:])  # the cause
    optimizer.zero_grad()
    loss.backward()  # the cause
    optimizer.step()
    if not clock.step():
        break
