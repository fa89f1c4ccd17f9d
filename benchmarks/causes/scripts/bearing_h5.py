"""Bearing fault classification from vibration windows stored in HDF5."""

import argparse
import os
import tempfile
import time
from pathlib import Path

import h5py
import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

N_CLASSES = 6


def prepare(path, chunk, n=2560, channels=8, length=1024):
    rng = np.random.default_rng(0)
    y = rng.integers(0, N_CLASSES, n)
    t = np.arange(length) / 12000.0
    with h5py.File(path + ".tmp", "w") as f:
        x = f.create_dataset(
            "signal",
            (n, channels, length),
            "f4",
            chunks=(chunk, channels, length),
            compression="gzip",
            compression_opts=1,
        )
        for lo in range(0, n, 512):
            yb = y[lo : lo + 512]
            freq = (300 + 250 * yb)[:, None, None] * rng.uniform(0.97, 1.03, (len(yb), 1, 1))
            sig = np.sin(2 * np.pi * freq * t + rng.uniform(0, 6, (len(yb), channels, 1)))
            sig += rng.normal(0, 1.0, sig.shape)
            x[lo : lo + 512] = np.round(sig * 64) / 64
        f["label"] = y
    os.replace(path + ".tmp", path)


class Windows(Dataset):
    def __init__(self, path):
        self.path = path
        self.file = None
        with h5py.File(path, "r") as f:
            self.labels = f["label"][:]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        if self.file is None:
            self.file = h5py.File(self.path, "r")
            self.signal = self.file["signal"]
        x = torch.from_numpy(self.signal[i])  # the cause
        return (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True), int(self.labels[i])


class Net(nn.Module):
    def __init__(self, c=8, h=48):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(c, h, 15, 2, 7),
            nn.BatchNorm1d(h),
            nn.ReLU(),
            nn.Conv1d(h, h, 9, 2, 4),
            nn.BatchNorm1d(h),
            nn.ReLU(),
            nn.Conv1d(h, 2 * h, 9, 2, 4),
            nn.BatchNorm1d(2 * h),
            nn.ReLU(),
            nn.Conv1d(2 * h, 2 * h, 5, 2, 2),
            nn.BatchNorm1d(2 * h),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(2 * h, N_CLASSES),
        )

    def forward(self, x):
        return self.net(x)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default=os.path.join(tempfile.gettempdir(), "bearing_h5"))
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--workers", type=int, default=1)
    ap.add_argument("--fixed", action="store_true")
    args = ap.parse_args()

    Path(args.data).mkdir(parents=True, exist_ok=True)
    if args.fixed:
        path, chunk = os.path.join(args.data, "bearing_c1.h5"), 1
    else:
        path, chunk = os.path.join(args.data, "bearing.h5"), 16
    if not Path(path).exists():
        prepare(path, chunk)

    torch.manual_seed(0)
    loader = DataLoader(
        Windows(path),
        batch_size=args.batch,
        shuffle=True,
        drop_last=True,
        num_workers=args.workers,
        persistent_workers=True,
        prefetch_factor=4,
    )
    model = Net()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)

    step, skip, t0 = 0, 6, None
    for epoch in range(args.epochs):
        total, correct = torch.zeros(()), torch.zeros(())
        for x, y in loader:
            if step == skip:
                t0 = time.perf_counter()
            logits = model(x)
            loss = criterion(logits, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
            correct += (logits.argmax(1) == y).sum()
            step += 1
        n = len(loader)
        print(f"epoch {epoch}  loss {total.item() / n:.4f}  acc {correct.item() / n / args.batch:.3f}", flush=True)
    print(f"{1e3 * (time.perf_counter() - t0) / (step - skip):.1f} ms per step")


if __name__ == "__main__":
    main()
