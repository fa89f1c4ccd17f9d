"""Tomorrow's sea ice from the last days' fields, read from a yearly archive."""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

DAYS, SIDE = 365, 72


def write_archive(path, years, seed=0):
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:SIDE, 0:SIDE] / SIDE
    fields = {}
    for year in years:
        season = np.cos(2 * np.pi * (np.arange(DAYS) - rng.uniform(0, 20)) / DAYS)[:, None, None]
        edge = 0.5 + 0.3 * season + 0.1 * np.sin(6 * x + rng.uniform(0, 6))
        ice = np.clip((edge - y) * 4 + 0.1 * rng.normal(size=(DAYS, SIDE, SIDE)), 0, 1)
        fields[f"ice_{year}"] = (ice * 250).astype(np.uint8)
    np.savez_compressed(path, **fields)


class IceDataset(Dataset):
    """The fields of `history` days in a row, and the day after."""

    def __init__(self, path, history=5, fixed=False):
        self.archive, self.history = np.load(path), history
        self.years = sorted(self.archive.files)
        if fixed:
            self.archive = {year: self.archive[year] for year in self.years}
        self.per_year = DAYS - history

    def __len__(self):
        return len(self.years) * self.per_year

    def __getitem__(self, index):
        year, day = divmod(index, self.per_year)
        window = self.archive[self.years[year]][day : day + self.history + 1]  # the cause
        window = torch.from_numpy(window.astype(np.float32) / 250)
        return window[:-1], window[-1:]


class IceNet(nn.Module):
    def __init__(self, history, width=20):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(history, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=2, dilation=2),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=4, dilation=4),
            nn.ReLU(),
            nn.Conv2d(width, 1, 1),
        )

    def forward(self, past):
        return past[:, -1:] + self.body(past)


def train(folder, args):
    path = Path(folder) / "ice.npz"
    write_archive(path, range(2015, 2020))
    torch.manual_seed(args.seed)
    loader = DataLoader(IceDataset(path, fixed=args.fixed), batch_size=args.batch, shuffle=True, drop_last=True)
    net = IceNet(history=5)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    step, start = 0, None
    while step < args.steps:
        for past, tomorrow in loader:
            loss = nn.functional.l1_loss(net(past), tomorrow)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            step += 1
            if step == 10:
                start = time.perf_counter()
            if step == args.steps:
                break
    print(f"{(time.perf_counter() - start) / (args.steps - 10) * 1e3:.2f} ms per step")
    print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=180)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    with tempfile.TemporaryDirectory() as folder:
        train(folder, parser.parse_args())
