"""Organic carbon of soil samples from near-infrared spectra (pandas table, ignite engine)."""
import time

import numpy as np
import pandas as pd
import torch
import torch.nn as nn
from ignite.engine import Engine, Events
from ignite.metrics import MeanSquaredError
from torch.utils.data import DataLoader, TensorDataset

BANDS = 600
SAMPLES = 2600
BATCH = 32
EPOCHS = 3
WARMUP = 5


def make_table():
    """One row per sample: the reflectance of each band and the laboratory value."""
    rng = np.random.default_rng(13)
    wavelength = np.linspace(0, 1, BANDS)
    carbon = rng.gamma(2.0, 1.2, SAMPLES)
    clay = rng.uniform(0.1, 0.6, SAMPLES)
    spectra = 0.4 + 0.2 * wavelength[None] - 0.04 * carbon[:, None] * np.exp(-((wavelength - 0.3) ** 2) / 0.02)
    spectra = spectra - 0.3 * clay[:, None] * np.exp(-((wavelength - 0.8) ** 2) / 0.005)
    spectra = spectra + rng.normal(0, 0.01, spectra.shape)
    table = pd.DataFrame(spectra, columns=[f"nm_{400 + 3 * i}" for i in range(BANDS)])
    table["carbon"] = carbon
    return table


class SpectraNet(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.stem = nn.Conv1d(1, width, 15, stride=2, padding=7)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm1d(width),
                nn.ReLU(),
                nn.Conv1d(width, width, 9, padding=4),
                nn.BatchNorm1d(width),
                nn.ReLU(),
                nn.Conv1d(width, width, 9, padding=4),
            )
            for _ in range(3)
        )
        self.head = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x):
        x = self.stem(x.unsqueeze(1))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean(-1)).squeeze(-1)


def main():
    torch.manual_seed(0)
    table = make_table()
    bands = [c for c in table.columns if c.startswith("nm_")]
    spectra = table[bands]
    spectra = (spectra - spectra.mean()) / spectra.std()
    carbon = np.log1p(table["carbon"])

    features = torch.from_numpy(spectra.to_numpy())
    target = torch.from_numpy(carbon.to_numpy())
    train = TensorDataset(features[:-200], target[:-200])
    holdout = TensorDataset(features[-200:], target[-200:])
    train_loader = DataLoader(train, batch_size=BATCH, shuffle=True, drop_last=True)
    holdout_loader = DataLoader(holdout, batch_size=100)

    model = SpectraNet().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.HuberLoss()
    marks = []

    def update(engine, batch):
        model.train()
        x, y = batch
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def predict(engine, batch):
        model.eval()
        with torch.no_grad():
            x, y = batch
            return model(x), y

    trainer = Engine(update)
    evaluator = Engine(predict)
    MeanSquaredError().attach(evaluator, "mse")

    @trainer.on(Events.ITERATION_COMPLETED)
    def clock(engine):
        marks.append(time.perf_counter())

    @trainer.on(Events.ITERATION_COMPLETED(every=25))
    def report(engine):
        print(f"iteration {engine.state.iteration}: loss {engine.state.output.item():.4f}")

    trainer.run(train_loader, max_epochs=EPOCHS)
    evaluator.run(holdout_loader)
    print(f"hold-out mse {evaluator.state.metrics['mse']:.4f}")
    print(f"final loss {trainer.state.output.item():.4f}")
    print(f"{1000 * np.diff(marks)[WARMUP:].mean():.1f} ms per step")


if __name__ == "__main__":
    main()
