"""Classifies small graphs; an engine trains, scores and stops early. --fixed: the remedy."""

import torch
import torch.nn.functional as F
from clock import FIXED, Clock
from torch import nn

NODES, FEATURES, CLASSES, GRAPHS, DRAWN, BATCH, EPOCHS = 24, 16, 4, 640, 320, 32, 22
STEPS = EPOCHS * (DRAWN // BATCH)


def graphs(count, seed):
    rng = torch.Generator().manual_seed(seed)
    label = torch.randint(CLASSES, (count,), generator=rng)
    density = 0.08 + 0.05 * label[:, None, None]
    upper = (torch.rand(count, NODES, NODES, generator=rng) < density).float().triu(1)
    adjacency = upper + upper.transpose(1, 2)
    return torch.randn(count, NODES, FEATURES, generator=rng), adjacency, label


class Isomorphism(nn.Module):
    """Sums over neighbours, then two dense layers, as many times as there are layers."""

    def __init__(self, width=224, layers=3):
        super().__init__()
        sizes = [FEATURES] + [width] * layers
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, b), nn.ReLU()) for a, b in zip(sizes, sizes[1:])
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x, adjacency):
        for layer in self.layers:
            x = layer(x + adjacency @ x / NODES)
        return self.head(x.mean(1))


class Meter:
    def __init__(self):
        self.loss, self.right, self.count = 0.0, 0, 0

    def add(self, logits, label):
        self.loss += F.cross_entropy(logits, label, reduction="sum").item()
        self.right += (logits.argmax(1) == label).sum().item()
        self.count += len(label)

    def result(self):
        return {"loss": self.loss / self.count, "accuracy": self.right / self.count}


class Engine:
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.best = model, optimizer, float("inf")

    def batches(self, data, shuffle):
        order = torch.randperm(len(data[2]))[:DRAWN] if shuffle else torch.arange(len(data[2]))
        for some in order.split(BATCH):
            yield tuple(part[some] for part in data)

    def train_epoch(self, data, clock):
        self.model.train()
        meter = Meter()
        for x, adjacency, label in self.batches(data, shuffle=True):
            logits = self.model(x, adjacency)
            loss = F.cross_entropy(logits, label)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            meter.add(logits.detach(), label)
            clock.step()
        return meter.result()

    @torch.no_grad()
    def score(self, data):
        self.model.eval()
        meter = Meter()
        for x, adjacency, label in self.batches(data, shuffle=False):
            meter.add(self.model(x, adjacency), label)
        return meter.result()

    def fit(self, training, validation, clock):
        for epoch in range(EPOCHS):
            shown = self.train_epoch(training, clock)
            if not FIXED:
                shown = self.score(training)  # the cause
            valid = self.score(validation)
            self.best = min(self.best, valid["loss"])
            print(f"epoch {epoch} training {shown['loss']:.4f} validation {valid['loss']:.4f} best {self.best:.4f}")


model = Isomorphism()
engine = Engine(model, torch.optim.Adam(model.parameters(), lr=5e-4, fused=True))
engine.fit(graphs(GRAPHS, 1), graphs(16, 2), Clock(STEPS))
