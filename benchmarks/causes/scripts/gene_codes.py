"""Learns short codes for the expression of genes in single cells with a contractive autoencoder."""

import argparse
import time
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Settings:
    cells: int = 6400
    genes: int = 2000
    types: int = 9
    code: int = 28
    batch: int = 96
    epochs: int = 5
    contraction: float = 1e-3
    lr: float = 1e-3
    fixed: bool = False


def expression(settings):
    """Counts of transcripts of cells of several types, normalised for depth and on a log scale."""
    generator = torch.Generator().manual_seed(0)
    profile = torch.distributions.Gamma(0.4, 0.2)
    rates = profile.sample((settings.types, settings.genes))
    kind = torch.randint(settings.types, (settings.cells,), generator=generator)
    depth = 0.5 + torch.rand(settings.cells, 1, generator=generator)
    counts = torch.poisson(rates[kind] * depth, generator=generator)
    scaled = torch.log1p(counts / counts.sum(1, keepdim=True) * 1e4)
    return (scaled - scaled.mean(0)) / (scaled.std(0) + 1e-4), kind


class ContractiveAutoencoder(nn.Module):
    def __init__(self, genes, code, hidden=256):
        super().__init__()
        self.encoder = nn.Linear(genes, code)
        self.decoder = nn.Sequential(nn.Linear(code, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, genes))

    def encode(self, x):
        return torch.sigmoid(self.encoder(x))

    def forward(self, x):
        code = self.encode(x)
        return code, self.decoder(code)


def contraction_by_autograd(model, x, code):
    """The squared norm of the Jacobian of the code by the expression, a mean over cells."""
    norm = 0.0
    for unit in range(code.shape[1]):  # the cause
        (row,) = torch.autograd.grad(code[:, unit].sum(), x, create_graph=True)  # the cause
        norm = norm + row.square().sum()
    return norm / len(x)


def contraction_in_closed_form(model, x, code):
    slope = code * (1 - code)
    return (slope.square() @ model.encoder.weight.square().sum(1)).mean()


class Trainer:
    def __init__(self, settings):
        self.settings = settings
        data, self.kind = expression(settings)
        self.loader = DataLoader(TensorDataset(data), settings.batch, shuffle=True, drop_last=True)
        self.model = ContractiveAutoencoder(settings.genes, settings.code)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=settings.lr)
        self.contraction = contraction_in_closed_form if settings.fixed else contraction_by_autograd
        self.step = 0

    def losses(self, x):
        x.requires_grad_(True)
        code, rebuilt = self.model(x)
        return F.mse_loss(rebuilt, x.detach()), self.contraction(self.model, x, code)

    def epoch(self, number):
        for (x,) in self.loader:
            rebuilt, contraction = self.losses(x)
            loss = rebuilt + self.settings.contraction * contraction
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.step += 1
            if self.step % 25 == 0:
                print(
                    f"epoch {number} step {self.step} rebuilt {rebuilt.item():.4f} penalty {contraction.item():.4f}",
                    flush=True,
                )

    def fit(self):
        began = time.perf_counter()
        for number in range(self.settings.epochs):
            self.epoch(number)
        return (time.perf_counter() - began) / self.step * 1e3


def parse():
    parser = argparse.ArgumentParser()
    for field in fields(Settings):
        if field.type is bool:
            parser.add_argument(f"--{field.name}", action="store_true")
        else:
            parser.add_argument(f"--{field.name}", type=field.type, default=field.default)
    return Settings(**vars(parser.parse_args()))


if __name__ == "__main__":
    torch.manual_seed(0)
    print(f"{Trainer(parse()).fit():.2f} ms per step")
