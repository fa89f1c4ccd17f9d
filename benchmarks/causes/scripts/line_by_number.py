"""Each sample reads the file of intervals up to its own line. --fixed: the lines' offsets are known, and it seeks."""

import itertools
import tempfile
from pathlib import Path

import numpy as np
import torch
from clock import FIXED, Clock
from torch import nn
from torch.utils.data import DataLoader, Dataset

GENOME = 400_000
WIDTH = 200


def write_intervals(path, count, seed=3):
    """Write a table of intervals, as a BED file has them, with a class in the last column."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, GENOME - WIDTH, count)
    classes = rng.integers(0, 2, count)
    with path.open("w") as file:
        for n, (start, label) in enumerate(zip(starts.tolist(), classes.tolist(), strict=True)):
            file.write(f"chr1\t{start}\t{start + WIDTH}\tpeak_{n}\t{label}\n")


class IntervalReader:
    """Gives the fields of the n-th line."""

    def __init__(self, path):
        self.path = path
        self.offsets = [0]
        with path.open("rb") as file:
            for line in file:
                self.offsets.append(self.offsets[-1] + len(line))

    def __len__(self):
        return len(self.offsets) - 1

    def __getitem__(self, n):
        if FIXED:
            with self.path.open("rb") as file:
                file.seek(self.offsets[n])
                line = file.readline().decode()
        else:
            with self.path.open() as file:
                line = next(itertools.islice(file, n, None))  # the cause
        return line.rstrip("\n").split("\t")


class Peaks(Dataset):
    """One-hot sequences under the intervals."""

    def __init__(self, reader, genome):
        self.reader = reader
        self.genome = genome
        self.onehot = np.eye(4, dtype=np.float32)

    def __len__(self):
        return len(self.reader)

    def __getitem__(self, index):
        _, start, end, _, label = self.reader[index]
        sequence = self.onehot[self.genome[int(start) : int(end)]]
        return torch.from_numpy(sequence.T.copy()), float(label)


class DeepBind(nn.Module):
    def __init__(self, motifs=48):
        super().__init__()
        self.scan = nn.Conv1d(4, motifs, 15, padding=7)
        self.mix = nn.Conv1d(motifs, motifs, 7, padding=3)
        self.head = nn.Sequential(nn.Linear(motifs, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))

    def forward(self, x):
        x = nn.functional.max_pool1d(torch.relu(self.scan(x)), 4)
        x = torch.relu(self.mix(x))
        return self.head(x.amax(-1)).squeeze(-1)


folder = tempfile.TemporaryDirectory()
table = Path(folder.name) / "peaks.bed"
write_intervals(table, 40_000)
genome = np.random.default_rng(1).integers(0, 4, GENOME)
loader = DataLoader(Peaks(IntervalReader(table), genome), batch_size=32, shuffle=True)
model = DeepBind()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
clock = Clock(150)
for x, y in loader:
    loss = nn.functional.binary_cross_entropy_with_logits(model(x), y.float())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
folder.cleanup()
