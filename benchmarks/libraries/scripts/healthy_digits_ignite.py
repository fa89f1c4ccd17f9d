"""Digit classifier with ignite: engines, a running loss and one validation per epoch."""
import time

import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from ignite.metrics import Accuracy, RunningAverage
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

BATCH = 64
WARMUP = 10


class Batches:
    """Mini-batches cut from tensors in memory, shuffled anew in each epoch."""

    def __init__(self, dataset, batch_size, shuffle):
        self.dataset, self.batch_size, self.shuffle = dataset, batch_size, shuffle

    def __len__(self):
        return len(self.dataset) // self.batch_size

    def __iter__(self):
        n = len(self.dataset)
        order = torch.randperm(n) if self.shuffle else torch.arange(n)
        for i in range(len(self)):
            yield self.dataset[order[i * self.batch_size:(i + 1) * self.batch_size]]


def digits():
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    images = F.interpolate(images, scale_factor=4, mode="bilinear")
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1472], order[1472:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(128, 10))


def main():
    torch.manual_seed(0)
    train_set, test_set = digits()
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def train_step(engine, batch):
        images, labels = batch
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def eval_step(engine, batch):
        images, labels = batch
        return model(images), labels

    trainer, evaluator = Engine(train_step), Engine(eval_step)
    RunningAverage(output_transform=lambda loss: loss).attach(trainer, "loss")
    Accuracy().attach(evaluator, "accuracy")
    clock = {}

    @trainer.on(Events.ITERATION_COMPLETED(once=WARMUP))
    def start_clock(engine):
        clock["start"] = time.perf_counter()

    @trainer.on(Events.EPOCH_COMPLETED)
    def validate(engine):
        model.eval()
        evaluator.run(Batches(test_set, BATCH, shuffle=False))
        model.train()
        print(f"epoch {engine.state.epoch} loss {engine.state.metrics['loss']:.4f} "
              f"accuracy {evaluator.state.metrics['accuracy']:.3f}")

    trainer.run(Batches(train_set, BATCH, shuffle=True), max_epochs=10)
    elapsed = time.perf_counter() - clock["start"]
    print(f"{elapsed / (trainer.state.iteration - WARMUP) * 1000:.1f} ms per step")


if __name__ == "__main__":
    main()
