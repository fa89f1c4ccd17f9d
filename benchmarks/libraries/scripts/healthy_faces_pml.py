"""Embeddings of badge portraits with pytorch-metric-learning (multi-similarity loss and miner)."""
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from pytorch_metric_learning import losses, miners
from pytorch_metric_learning.samplers import MPerClassSampler

PEOPLE = 40
PER_PERSON = 24
SIZE = 48
BATCH = 64
STEPS = 440
WARMUP = 5


def make_portraits():
    gen = torch.Generator().manual_seed(21)
    prototypes = F.interpolate(torch.rand(PEOPLE, 3, 8, 8, generator=gen), size=SIZE, mode="bilinear")
    labels = torch.arange(PEOPLE).repeat_interleave(PER_PERSON)
    gain = 0.7 + 0.6 * torch.rand(len(labels), 1, 1, 1, generator=gen)
    noise = 0.8 * torch.randn(len(labels), 3, SIZE, SIZE, generator=gen)
    return prototypes[labels] * gain + noise, labels


class Embedder(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        widths = (3, 32, 64, 96)
        self.convs = nn.Sequential(
            *[
                nn.Sequential(
                    nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(),
                    nn.Conv2d(b, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(),
                )
                for a, b in zip(widths[:-1], widths[1:])
            ]
        )
        self.project = nn.Linear(widths[-1], dim)

    def forward(self, x):
        return F.normalize(self.project(self.convs(x).mean((2, 3))), dim=1)


@torch.no_grad()
def recall_at_1(model, images, labels):
    model.eval()
    embeddings = torch.cat([model(chunk) for chunk in images.split(160)])
    similarity = embeddings @ embeddings.T
    similarity.fill_diagonal_(-1)
    model.train()
    return (labels[similarity.argmax(1)] == labels).float().mean().item()


def main():
    torch.manual_seed(0)
    images, labels = make_portraits()
    sampler = MPerClassSampler(labels, m=4, batch_size=BATCH, length_before_new_iter=STEPS * BATCH)
    batches = torch.tensor(list(sampler)).view(STEPS, BATCH)

    model = Embedder()
    miner = miners.MultiSimilarityMiner(epsilon=0.1)
    criterion = losses.MultiSimilarityLoss(alpha=2, beta=50, base=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    marks = []
    for step, rows in enumerate(batches):
        target = labels[rows]
        embeddings = model(images[rows])
        loss = criterion(embeddings, target, miner(embeddings, target))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 110 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")
        marks.append(time.perf_counter())

    steps = torch.tensor(marks, dtype=torch.float64).diff()[WARMUP:]
    print(f"recall@1 {recall_at_1(model, images, labels):.4f}")
    print(f"final loss {loss.item():.4f}")
    print(f"{1000 * steps.mean().item():.1f} ms per step")


if __name__ == "__main__":
    main()
