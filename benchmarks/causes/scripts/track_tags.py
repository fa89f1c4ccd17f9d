"""A classifier of music tracks reads their features from a CSV table. --fixed: the remedy."""

import ast
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from clock import FIXED, Clock
from torch import nn
from torch.utils.data import DataLoader, Dataset

FEATURES, TAGS = 128, 12


def write_table(path, count=3_000):
    rng = np.random.default_rng(0)
    tag = rng.integers(0, TAGS, count)
    features = rng.standard_normal((TAGS, FEATURES))[tag] + 2 * rng.standard_normal((count, FEATURES))
    rows = [np.round(row, 4).tolist() for row in features]
    pd.DataFrame({"track": np.arange(count), "tag": tag, "features": rows}).to_csv(path, index=False)


class Tracks(Dataset):
    def __init__(self, path):
        table = pd.read_csv(path)
        self.tags = table["tag"].to_numpy()
        self.features = table["features"].tolist()
        if FIXED:
            self.features = np.array([ast.literal_eval(text) for text in self.features], np.float32)

    def __len__(self):
        return len(self.tags)

    def __getitem__(self, index):
        if FIXED:
            return torch.from_numpy(self.features[index]), self.tags[index]
        features = ast.literal_eval(self.features[index])  # the cause
        return torch.tensor(features, dtype=torch.float32), self.tags[index]


class Tagger(nn.Module):
    def __init__(self, width=512, dropout=0.2):
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm1d(FEATURES),
            nn.Linear(FEATURES, width),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, TAGS),
        )

    def forward(self, x):
        return self.layers(x)


with tempfile.TemporaryDirectory() as name:
    path = Path(name) / "tracks.csv"
    write_table(path)
    loader = DataLoader(Tracks(path), batch_size=128, shuffle=True, drop_last=True)
model = Tagger()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
clock = Clock(184)
running = True
while running:
    for features, tags in loader:
        loss = nn.functional.cross_entropy(model(features), tags, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running = clock.step()
        if not running:
            break
print(f"loss {loss.item():.4f}")
