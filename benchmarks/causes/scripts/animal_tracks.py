"""Tells the kind of an animal from the track of its GPS collar with a recurrent network."""

import argparse
import time

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader

KINDS = ["fox", "deer", "boar", "wolf"]


def collar_table(animals, seed=0):
    """Positions of all animals in one table, in the order in which they came in."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(40, 90, animals)
    animal = np.repeat(np.arange(animals), lengths)
    kind = rng.integers(len(KINDS), size=animals)
    step = rng.normal(size=(len(animal), 2)) * (0.5 + 0.2 * kind[animal])[:, None]
    step[:, 0] += 0.1 * kind[animal]
    hour = np.concatenate([np.arange(n) for n in lengths]) + rng.random(len(animal)) * 0.5
    table = pd.DataFrame({"animal": animal, "hour": hour, "dx": step[:, 0], "dy": step[:, 1]})
    table["kind"] = np.array(KINDS)[kind[animal]]
    return table.sort_values("hour", kind="stable", ignore_index=True)


def tracks_one_by_one(table):
    for animal in sorted(table["animal"].unique()):
        yield table[table["animal"] == animal]  # the cause


def tracks_grouped(table):
    for _, track in table.groupby("animal", sort=True):
        yield track


def build_samples(table, split):
    """The steps of each animal, in the order of time, and the number of its kind."""
    samples = []
    for track in split(table):  # the cause
        steps = torch.from_numpy(track[["hour", "dx", "dy"]].to_numpy(dtype=np.float32))
        steps[1:, 0] = steps[:, 0].diff()
        samples.append((steps, KINDS.index(track["kind"].iat[0])))
    return samples


def collate(batch):
    steps, kinds = zip(*batch)
    return pad_sequence(steps, batch_first=True), torch.tensor([len(s) for s in steps]), torch.tensor(kinds)


class TrackNet(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.enter = nn.Linear(3, hidden)
        self.gru = nn.GRU(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, len(KINDS))

    def forward(self, steps, lengths):
        x = F.relu(self.enter(steps))
        _, last = self.gru(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return self.head(last[-1])


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    right = torch.cat([model(steps, lengths).argmax(1) == kinds for steps, lengths, kinds in loader])
    model.train()
    return right.float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--animals", type=int, default=8000)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    began = time.perf_counter()
    samples = build_samples(collar_table(args.animals), tracks_grouped if args.fixed else tracks_one_by_one)
    cut = len(samples) * 9 // 10
    loader = DataLoader(samples[:cut], args.batch, shuffle=True, collate_fn=collate, drop_last=True)
    held_out = DataLoader(samples[cut:], 200, collate_fn=collate)
    print(f"{len(samples)} tracks after {time.perf_counter() - began:.1f} s", flush=True)
    model = TrackNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    step = 0
    for epoch in range(args.epochs):
        for steps, lengths, kinds in loader:
            loss = F.cross_entropy(model(steps, lengths), kinds)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if step % 30 == 0:
                print(f"step {step} loss {loss.item():.5f}", flush=True)
        print(f"epoch {epoch} loss {loss.item():.5f} accuracy {evaluate(model, held_out):.3f}", flush=True)
    print(f"{(time.perf_counter() - began) / step * 1e3:.2f} ms per step, the start with it")


if __name__ == "__main__":
    main()
