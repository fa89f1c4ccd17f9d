"""Which frog is calling? Log-spectra of one-second recordings, a small set heard many times."""

import argparse
import json
import os
import tempfile
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

RATE, FROGS = 8000, 8


def record_pond(folder, count, seed=9):
    rng = np.random.default_rng(seed)
    t = np.arange(RATE) / RATE
    labels = rng.integers(0, FROGS, count)
    for number, frog in enumerate(labels):
        pulse = np.sin(2 * np.pi * (3 + frog) * t + rng.uniform(0, 6)) > 0.3
        call = pulse * np.sin(2 * np.pi * (500 + 320 * frog + rng.normal(0, 40)) * t)
        sound = 0.4 * call + 0.2 * rng.normal(size=RATE)
        (np.clip(sound, -1, 1) * 32767).astype(np.int16).tofile(os.path.join(folder, f"call_{number:04d}.pcm"))
    with open(os.path.join(folder, "labels.json"), "w") as file:
        json.dump(labels.tolist(), file)


class FrogCalls(Dataset):
    def __init__(self, folder, size=400, hop=160):
        with open(os.path.join(folder, "labels.json")) as file:
            self.labels = json.load(file)
        self.folder, self.size, self.hop = folder, size, hop
        self.window = np.hanning(size).astype(np.float32)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        sound = np.fromfile(os.path.join(self.folder, f"call_{index:04d}.pcm"), np.int16)
        frames = np.lib.stride_tricks.sliding_window_view(sound, self.size)[:: self.hop]
        power = np.abs(np.fft.rfft(frames * self.window / 32768, axis=1)[:, 1:161]) ** 2
        return torch.from_numpy(np.log(power + 1e-4).astype(np.float32)), self.labels[index]


class CallNet(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(160, width, 5, padding=2),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Conv1d(width, width, 5, padding=2),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Conv1d(width, width, 5, padding=2),
            nn.BatchNorm1d(width),
            nn.ReLU(),
        )
        self.head = nn.Linear(width, FROGS)

    def forward(self, spectra):
        return self.head(self.body(spectra.transpose(1, 2)).amax(-1))


class Trainer:
    def __init__(self, args, folder):
        self.args, self.step, self.ends = args, 0, []
        self.model = CallNet()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        options = {"persistent_workers": True} if args.fixed else {}
        calls = FrogCalls(folder)
        order = RandomSampler(calls, generator=torch.Generator().manual_seed(args.seed))
        self.loader = DataLoader(calls, args.batch, sampler=order, num_workers=args.workers, **options)  # the cause

    def epoch(self):
        for spectra, frogs in self.loader:
            self.loss = nn.functional.cross_entropy(self.model(spectra), frogs)
            self.optimizer.zero_grad()
            self.loss.backward()
            self.optimizer.step()
            self.step += 1
            self.ends.append(time.perf_counter())

    def fit(self):
        while self.step < self.args.steps:
            self.epoch()
        half = len(self.ends) // 2
        print(f"loss {self.loss.item():.6f}")
        print(f"{(self.ends[-1] - self.ends[half]) / (len(self.ends) - 1 - half) * 1e3:.2f} ms per step")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--calls", type=int, default=96)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fixed", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    with tempfile.TemporaryDirectory() as pond:
        record_pond(pond, arguments.calls)
        Trainer(arguments, pond).fit()
