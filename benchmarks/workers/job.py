"""A small training job of some kind, with a loader of so many workers: what `benchmarks.workers` records."""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

Batch = Any


class Clicks(Dataset[Batch]):
    """Whole batches of random features, as a benchmark of recommenders makes them."""

    def __init__(self, batches: int, batch: int, tables: int) -> None:
        self.batches, self.batch, self.tables = batches, batch, tables

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> Batch:
        rng = np.random.default_rng(index)
        dense = torch.from_numpy(rng.random((self.batch, 13), dtype=np.float32))
        sparse, offsets = [], []
        for _ in range(self.tables):
            counts = rng.integers(1, 8, self.batch)
            offsets.append(torch.from_numpy(np.concatenate(([0], counts.cumsum()[:-1]))))
            sparse.append(torch.from_numpy(rng.integers(0, 10_000, int(counts.sum()))))
        return dense, offsets, sparse, torch.from_numpy(rng.random((self.batch, 1), dtype=np.float32))


class Recommender(nn.Module):
    """Embedding bags beside dense features, and a network over both."""

    def __init__(self, tables: int, width: int) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(10_000, 32, mode="sum", sparse=True) for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, width), nn.ReLU(), nn.Linear(width, 32), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(32 * (tables + 1), width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, batch: Batch) -> Tensor:
        """Return the loss."""
        dense, offsets, sparse, wanted = batch
        found = [bag(s, o) for bag, s, o in zip(self.bags, sparse, offsets, strict=True)]
        said = self.top(torch.cat([self.bottom(dense), *found], dim=1))
        return nn.functional.binary_cross_entropy_with_logits(said, wanted)


class Images(Dataset[Batch]):
    """Images in memory, each packed: to take one means to unpack it, and `work` passes over its pixels."""

    def __init__(self, samples: int, side: int, work: int, sleep: float = 0.0) -> None:
        self.samples, self.side, self.work, self.sleep = samples, side, work, sleep
        rng = np.random.default_rng(0)
        self.packed = [zlib.compress(rng.integers(0, 16, side * side, dtype=np.uint8).tobytes()) for _ in range(64)]

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Batch:
        if self.sleep:
            time.sleep(self.sleep)
        raw = np.frombuffer(zlib.decompress(self.packed[index % 64]), dtype=np.uint8)
        image = raw.reshape(1, self.side, self.side).astype(np.float32) / 16
        for _ in range(self.work):
            image = np.sqrt(image * image + 0.1)
        return (torch.from_numpy(image) - 0.5) / 0.3, index % 10


class Convnet(nn.Module):
    """Two convolutions and two layers."""

    def __init__(self, side: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3), nn.ReLU(), nn.Conv2d(width, 2 * width, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(2 * width * ((side - 4) // 2) ** 2, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip

    def forward(self, batch: Batch) -> Tensor:
        """Return the loss."""
        images, wanted = batch
        return nn.functional.cross_entropy(self.body(images), wanted)


class Words(Dataset[Batch]):
    """Lines of text that are split and numbered in Python."""

    def __init__(self, samples: int, length: int) -> None:
        rng = np.random.default_rng(0)
        self.samples, self.length = samples, length
        self.known = {f"w{n}": n for n in range(5_000)}
        self.lines = [" ".join(f"w{n}" for n in rng.integers(0, 6_000, length)) for _ in range(256)]

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Batch:
        numbers = [self.known.get(word.strip(), 0) for word in self.lines[index % 256].split(" ")]
        return torch.tensor(numbers[:-1]), torch.tensor(numbers[1:])


class Language(nn.Module):
    """A recurrent network over words."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(5_000, width), nn.GRU(width, width), nn.Linear(width, 5_000)

    def forward(self, batch: Batch) -> Tensor:
        """Return the loss."""
        words, following = batch
        out, _ = self.body(self.embed(words.T))
        return nn.functional.cross_entropy(self.head(out).flatten(0, 1), following.T.flatten())


class Rows(Dataset[Batch]):
    """Rows of a table in memory."""

    def __init__(self, samples: int, columns: int) -> None:
        self.samples, self.table = samples, torch.randn(4_096, columns)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Batch:
        return self.table[index % 4_096], float(index % 2)


class Dense(nn.Module):
    """Three layers."""

    def __init__(self, columns: int, width: int) -> None:
        super().__init__()
        layers = (nn.Linear(columns, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
        self.body = nn.Sequential(*layers)

    def forward(self, batch: Batch) -> Tensor:
        """Return the loss."""
        rows, wanted = batch
        return nn.functional.mse_loss(self.body(rows).squeeze(1), wanted.float())


@dataclass(frozen=True)
class Kind:
    """A kind of job: its data set of so many batches, its batch size (None: samples are whole batches), its model."""

    data: Callable[[int], Dataset[Batch]]
    batch: int | None
    model: Callable[[], nn.Module]
    threads: int = 2


def _images(side: int, batch: int, work: int, width: int, sleep: float = 0.0, threads: int = 2) -> Kind:
    return Kind(lambda n: Images(n * batch, side, work, sleep), batch, lambda: Convnet(side, width), threads)


KINDS = {
    # Those that the replay's constants were chosen with (TUNED), and
    "recommender": Kind(lambda n: Clicks(n, 256, 16), None, lambda: Recommender(16, 256)),
    "convnet": _images(28, 64, 0, 16),
    "decode": _images(96, 16, 12, 4),
    "storage": _images(28, 32, 0, 16, sleep=0.001),
    "dense-1": Kind(lambda n: Rows(n * 256, 512), 256, lambda: Dense(512, 512), threads=1),
    "decode-1": _images(64, 32, 6, 8, threads=1),
    # those that it was not.
    "recommender-wide": Kind(lambda n: Clicks(n, 1_024, 8), None, lambda: Recommender(8, 512)),
    "convnet-1": _images(28, 64, 0, 16, threads=1),
    "decode-heavy": _images(128, 32, 12, 2),
    "storage-slow": _images(28, 32, 0, 8, sleep=0.003),
    "words": Kind(lambda n: Words(n * 32, 64), 32, lambda: Language(96)),
    "dense": Kind(lambda n: Rows(n * 512, 2_048), 512, lambda: Dense(2_048, 256)),
}  # fmt: skip

TUNED = ("recommender", "convnet", "decode", "storage", "dense-1", "decode-1")


def main() -> None:
    """Train for so many steps, and print the mean step of the second half, ns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=4.0)
    args = parser.parse_args()
    kind = KINDS[args.kind]
    torch.manual_seed(0)
    torch.set_num_threads(kind.threads)
    loader = DataLoader(kind.data(1_000_000 // (kind.batch or 1)), kind.batch, num_workers=args.workers)
    model = kind.model()
    sparse = [p for m in model.modules() if isinstance(m, nn.EmbeddingBag) for p in m.parameters()]
    rest = [p for p in model.parameters() if all(p is not s for s in sparse)]
    optimizers = [torch.optim.SGD(part, lr=0.01) for part in (rest, sparse) if part]
    began, took = time.perf_counter(), []
    for batch in loader:
        loss = model(batch)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        took.append(time.perf_counter())
        if took[-1] - began > args.seconds and len(took) > 10:
            break
    half = took[len(took) // 2 :]
    print((half[-1] - half[0]) / (len(half) - 1) * 1e9)


if __name__ == "__main__":
    main()
