"""Recommends books: reads ratings from a table with the ids of a shop, and trains factors and a small network."""

import argparse
import csv
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


def write_ratings(path, ratings, readers, books, seed=0):
    """A table of reader, book, rating and day, in the order of time, with ids as a shop would have them."""
    rng = np.random.default_rng(seed)
    isbn = [f"978{n:010d}" for n in rng.choice(10**9, books, replace=False)]
    account = [f"R-{n:08x}" for n in rng.choice(2**31, readers, replace=False)]
    taste, kind = rng.normal(size=(readers, 4)), rng.normal(size=(books, 4))
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["reader", "isbn", "rating", "day"])
        who = (readers * rng.random(ratings) ** 1.5).astype(int)
        what = (books * rng.random(ratings) ** 1.2).astype(int)
        liking = 3 + (taste[who] * kind[what]).sum(1) / 2 + rng.normal(0, 0.3, ratings)
        for n in range(ratings):
            writer.writerow([account[who[n]], isbn[what[n]], f"{np.clip(liking[n], 1, 5):.0f}", n * 365 // ratings])


class Ratings:
    """The table with the ids numbered from nought in the order in which they first occur."""

    def __init__(self, path, fixed):
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
        self.fixed = fixed
        self.readers = list(dict.fromkeys(row["reader"] for row in rows))
        self.books = list(dict.fromkeys(row["isbn"] for row in rows))
        self.reader = self.numbered([row["reader"] for row in rows], self.readers)
        self.book = self.numbered([row["isbn"] for row in rows], self.books)
        self.rating = torch.tensor([float(row["rating"]) for row in rows])
        self.day = torch.tensor([int(row["day"]) for row in rows])

    def numbered(self, ids, known):
        if self.fixed:
            number = {name: n for n, name in enumerate(known)}
            return torch.tensor([number[name] for name in ids])
        return torch.tensor([known.index(name) for name in ids])  # the cause

    def split(self, last_days):
        late = self.day >= self.day.max() - last_days
        return (~late).nonzero().squeeze(1), late.nonzero().squeeze(1)

    def batches(self, rows, size, generator=None):
        if generator is not None:
            rows = rows[torch.randperm(len(rows), generator=generator)]
        for part in rows.split(size):
            yield self.reader[part], self.book[part], self.rating[part]


class NeuralFactors(nn.Module):
    def __init__(self, readers, books, factors=32, width=256):
        super().__init__()
        self.reader, self.book = nn.Embedding(readers, factors, sparse=True), nn.Embedding(books, factors, sparse=True)
        for table in (self.reader, self.book):
            nn.init.normal_(table.weight, std=0.1)
        self.net = nn.Sequential(
            nn.Linear(3 * factors, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, reader, book):
        a, b = self.reader(reader), self.book(book)
        return 3 + self.net(torch.cat([a, b, a * b], dim=1)).squeeze(1)


@torch.no_grad()
def root_mean_square_error(model, data, rows):
    squares = sum(F.mse_loss(model(r, b), y, reduction="sum") for r, b, y in data.batches(rows, 4096))
    return (squares / len(rows)).sqrt().item()


def train(path, args):
    began = time.perf_counter()
    data = Ratings(path, args.fixed)
    train_rows, valid_rows = data.split(last_days=20)
    print(f"{len(data.readers)} readers, {len(data.books)} books, {len(train_rows)} ratings", flush=True)
    model = NeuralFactors(len(data.readers), len(data.books))
    tables = torch.optim.SparseAdam([*model.reader.parameters(), *model.book.parameters()], lr=5e-3)
    dense = torch.optim.Adam(model.net.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    step = 0
    for epoch in range(args.epochs):
        total = torch.zeros(())
        for reader, book, rating in data.batches(train_rows, args.batch, generator):
            loss = F.mse_loss(model(reader, book), rating)
            tables.zero_grad()
            dense.zero_grad()
            loss.backward()
            tables.step()
            dense.step()
            step, total = step + 1, total + loss.detach()
            if step % 25 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
        print(f"epoch {epoch} valid {root_mean_square_error(model, data, valid_rows):.4f}", flush=True)
    print(f"{(time.perf_counter() - began) / step * 1e3:.2f} ms per step")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ratings", type=int, default=50000)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        write_ratings(Path(folder) / "ratings.csv", args.ratings, readers=5000, books=12000)
        train(Path(folder) / "ratings.csv", args)
