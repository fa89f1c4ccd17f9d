"""Click-through-rate model (hashed categorical fields + numeric columns)."""

import argparse
import time

import numpy as np
import pandas as pd
import torch
import torch.nn as nn

FIELDS = {
    "user": 300_000,
    "ad": 120_000,
    "page": 150_000,
    "device": 20_000,
    "region": 4_000,
    "campaign": 40_000,
    "query": 200_000,
    "hour": 24,
}
NUMERIC = ["price", "age_days", "n_impressions", "n_clicks"]


def make_log(n_rows, seed=0):
    rng = np.random.default_rng(seed)
    cols = {f: np.minimum(rng.zipf(1.3, n_rows) - 1, card - 1) for f, card in FIELDS.items() if f != "hour"}
    cols["hour"] = rng.integers(0, 24, n_rows)
    df = pd.DataFrame(cols)
    for c in NUMERIC:
        df[c] = rng.lognormal(0, 1, n_rows).astype(np.float32)
    score = 0.8 * (df["ad"] % 7 == 0) + 0.5 * (df["user"] % 5 == 0) - 0.3 * np.log(df["price"])
    df["click"] = (rng.random(n_rows) < 1 / (1 + np.exp(-(score - 1.0)))).astype(np.float32)
    return df


class CTRNet(nn.Module):
    def __init__(self, cards, dim=16, sparse=False):
        super().__init__()
        offsets = np.concatenate([[0], np.cumsum(cards)[:-1]])
        self.register_buffer("offsets", torch.from_numpy(offsets).long())
        self.table = nn.Embedding(int(sum(cards)), dim, sparse=sparse)  # the cause
        nn.init.uniform_(self.table.weight, -0.02, 0.02)
        n_in = len(cards) * dim + len(NUMERIC)
        self.mlp = nn.Sequential(nn.Linear(n_in, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, cats, nums):
        e = self.table(cats + self.offsets)
        square_of_sum = e.sum(1).pow(2)
        sum_of_square = e.pow(2).sum(1)
        fm = 0.5 * (square_of_sum - sum_of_square).sum(1)
        return self.mlp(torch.cat([e.flatten(1), nums], 1)).squeeze(1) + fm


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=120)
    ap.add_argument("--batch", type=int, default=8192)
    ap.add_argument("--fixed", action="store_true")
    args = ap.parse_args()

    torch.manual_seed(0)
    df = make_log(500_000)
    cats = torch.from_numpy(df[list(FIELDS)].to_numpy(np.int64, copy=True))
    nums = torch.from_numpy(np.log1p(df[NUMERIC].to_numpy(np.float32)))
    click = torch.from_numpy(df["click"].to_numpy(np.float32))

    cards = list(FIELDS.values())
    if args.fixed:
        model = CTRNet(cards, sparse=True)
    else:
        model = CTRNet(cards)  # the cause
    opt = torch.optim.Adagrad(model.parameters(), lr=0.02)
    criterion = nn.BCEWithLogitsLoss()

    skip, t0 = 10, None
    order = torch.randperm(len(click))
    running = torch.zeros(())
    for step in range(args.steps):
        if step == skip:
            t0 = time.perf_counter()
        lo = step * args.batch % (len(order) - args.batch)
        idx = order[lo : lo + args.batch]
        loss = criterion(model(cats[idx], nums[idx]), click[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        running += loss.detach()
        if (step + 1) % 40 == 0:
            print(f"step {step + 1}  logloss {running.item() / 40:.5f}", flush=True)
            running.zero_()
    dt = time.perf_counter() - t0
    print(f"{1e3 * dt / (args.steps - skip):.1f} ms per step")


if __name__ == "__main__":
    main()
