"""A table of numbers and categories from a mapped file, batch by batch. Nothing is known to be wrong with it."""

import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

ROWS, NUMBERS, LEVELS = 60_000, 40, (200, 50, 1_000)
BATCH, EPOCHS, STEPS_OF_EPOCH = 512, 3, 100


class Table(Dataset):
    """Gives the rows of a whole batch at once."""

    def __init__(self, folder, rows):
        self.numbers = np.load(folder / "numbers.npy", mmap_mode="r")[rows]
        self.levels = np.load(folder / "levels.npy", mmap_mode="r")[rows]
        self.target = np.load(folder / "target.npy", mmap_mode="r")[rows]

    def __len__(self):
        return len(self.target)

    def __getitem__(self, rows):
        return tuple(torch.from_numpy(column[rows]) for column in (self.numbers, self.levels, self.target))


def write(folder):
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal((ROWS, NUMBERS), np.float32)
    levels = np.stack([rng.integers(0, count, ROWS) for count in LEVELS], 1)
    np.save(folder / "numbers.npy", numbers)
    np.save(folder / "levels.npy", levels)
    np.save(folder / "target.npy", (numbers[:, :3].sum(1) + levels[:, 1] / 50).astype(np.float32))


class TabularNet(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(count, 16) for count in LEVELS)
        self.layers = nn.Sequential(
            nn.Linear(NUMBERS + 16 * len(LEVELS), width), nn.ReLU(), nn.Dropout(0.1),
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1),
        )  # fmt: skip

    def forward(self, numbers, levels):
        embedded = [table(levels[:, n]) for n, table in enumerate(self.tables)]
        return self.layers(torch.cat([numbers, *embedded], 1)).squeeze(1)


@torch.no_grad()
def validate(model, loader):
    model.eval()
    total, rows = torch.zeros(()), 0
    for numbers, levels, target in loader:
        total += nn.functional.mse_loss(model(numbers, levels), target, reduction="sum")
        rows += len(target)
    model.train()
    return total.item() / rows


def main():
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        training, held_out = Table(folder, slice(4_000, None)), Table(folder, slice(0, 4_000))
        batches = BatchSampler(RandomSampler(training), BATCH, drop_last=True)
        loader = DataLoader(training, sampler=batches, batch_size=None)
        held_out = DataLoader(held_out, sampler=BatchSampler(range(4_000), 2_000, drop_last=False), batch_size=None)
        model = TabularNet()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        best, steps, began = float("inf"), 0, time.perf_counter()
        for epoch in range(EPOCHS):
            for n, (numbers, levels, target) in enumerate(loader):
                if n == STEPS_OF_EPOCH:
                    break
                loss = nn.functional.mse_loss(model(numbers, levels), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                steps += 1
            error = validate(model, held_out)
            print(f"epoch {epoch}: {error:.4f}")
            if error < best:
                best = error
                torch.save(model.state_dict(), folder / "best.pt")
        print(f"STEP_MS {(time.perf_counter() - began) / steps * 1e3:.3f}")


if __name__ == "__main__":
    main()
