"""Water levels of harbours six hours ahead, from windows of gauge records kept in HDF5."""

import argparse
import os
import tempfile
import time

import h5py
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

HARBOURS, HOURS = 40, 6000


def record(path, seed=2):
    rng = np.random.default_rng(seed)
    hours = np.arange(HOURS, dtype=np.float32)
    with h5py.File(path, "w") as store:
        for name in range(HARBOURS):
            phase, height = rng.uniform(0, 6, 3), rng.uniform(0.2, 1.5, 3)
            level = sum(h * np.sin(2 * np.pi * hours / p + q) for h, p, q in zip(height, (12.42, 12.0, 25.82), phase))
            surge = np.convolve(rng.normal(size=HOURS), np.ones(30) / 30, "same")
            wind = rng.normal(size=HOURS)
            group = store.create_group(f"harbour_{name:02d}")
            group.create_dataset("series", data=np.stack([level + surge, surge, wind], 1).astype(np.float32))
            group.attrs["datum"] = float(rng.uniform(-0.2, 0.2))


class GaugeReader:
    """Access to the store by harbour and hour."""

    def __init__(self, path, keep=False):
        self.path, self.keep, self.store, self.groups = path, keep, None, {}

    def read(self, harbour, first, last):
        if not self.keep:
            with h5py.File(self.path, "r") as store:  # the cause
                group = store[f"harbour_{harbour:02d}"]
                return group["series"][first:last], group.attrs["datum"]
        if self.store is None:
            self.store = h5py.File(self.path, "r")
        if harbour not in self.groups:
            group = self.store[f"harbour_{harbour:02d}"]
            self.groups[harbour] = group["series"], group.attrs["datum"]
        series, datum = self.groups[harbour]
        return series[first:last], datum


class TideWindows(Dataset):
    def __init__(self, reader, past=168, ahead=6):
        self.reader, self.past, self.ahead = reader, past, ahead
        self.per_harbour = HOURS - past - ahead

    def __len__(self):
        return HARBOURS * self.per_harbour

    def __getitem__(self, index):
        harbour, first = divmod(index, self.per_harbour)
        window, datum = self.reader.read(harbour, first, first + self.past + self.ahead)
        window[:, 0] -= datum
        return torch.from_numpy(window[: self.past]), torch.from_numpy(window[self.past :, 0].copy())


class TideNet(nn.Module):
    def __init__(self, width=48, ahead=6):
        super().__init__()
        layers, inputs = [], 3
        for dilation in (1, 2, 4, 8):
            layers += [nn.Conv1d(inputs, width, 3, padding=dilation, dilation=dilation), nn.GELU()]
            inputs = width
        self.body, self.head = nn.Sequential(*layers), nn.Linear(2 * width, ahead)

    def forward(self, past):
        features = self.body(past.transpose(1, 2))
        return self.head(torch.cat([features.mean(-1), features[..., -1]], 1))


def train(path, args):
    torch.manual_seed(args.seed)
    windows = TideWindows(GaugeReader(path, keep=args.fixed))
    chosen = Subset(windows, torch.randperm(len(windows))[: args.steps * args.batch].tolist())
    loader = DataLoader(chosen, batch_size=args.batch)
    net = TideNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    marks = []
    for past, level in loader:
        marks.append(time.perf_counter())
        optimizer.zero_grad()
        loss = nn.functional.smooth_l1_loss(net(past), level)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    late = np.diff(marks[len(marks) // 2 :])
    print(f"loss {loss.item():.6f}")
    print(f"{late.mean() * 1e3:.2f} ms per step")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fixed", action="store_true")
    with tempfile.TemporaryDirectory() as scratch:
        gauges = os.path.join(scratch, "gauges.h5")
        record(gauges)
        train(gauges, parser.parse_args())
