"""Predicts promoter activity from DNA: a convolutional network on one-hot sequences."""

import argparse
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split

BASES = "ACGT"
MOTIF = "TATAAAAG"
ONE_HOT = {"A": [1, 0, 0, 0], "C": [0, 1, 0, 0], "G": [0, 0, 1, 0], "T": [0, 0, 0, 1], "N": [0, 0, 0, 0]}
COMPLEMENT = str.maketrans(BASES, BASES[::-1])

TABLE = np.zeros((256, 4), dtype=np.float32)
for _base, _row in ONE_HOT.items():
    TABLE[ord(_base)] = _row


def encode(sequence):
    return np.array([ONE_HOT[base] for base in sequence], dtype=np.float32)  # the cause


def encode_fast(sequence):
    return TABLE[np.frombuffer(sequence.encode("ascii"), dtype=np.uint8)]


def simulate(count, length, seed=0):
    rng = np.random.default_rng(seed)
    letters = np.frombuffer(BASES.encode(), dtype=np.uint8)[rng.integers(4, size=(count, length))]
    sequences, activity = [], []
    for row in letters:
        sequence, copies = row.tobytes().decode(), int(rng.integers(4))
        for place in rng.integers(0, length - len(MOTIF), copies):
            sequence = sequence[:place] + MOTIF + sequence[place + len(MOTIF) :]
        sequences.append(sequence)
        activity.append(copies + rng.normal(0, 0.2))
    return sequences, np.array(activity, dtype=np.float32)


class Promoters(Dataset):
    def __init__(self, sequences, activity, encoder):
        self.sequences, self.activity, self.encoder = sequences, activity, encoder

    def __len__(self):
        return len(self.sequences)

    def __getitem__(self, index):
        sequence = self.sequences[index]
        if torch.rand(()) < 0.5:
            sequence = sequence.translate(COMPLEMENT)[::-1]
        return self.encoder(sequence).T, self.activity[index]  # the cause


class ActivityNet(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.first = nn.Conv1d(4, width, 15, stride=2, padding=7)
        self.blocks = nn.ModuleList([nn.Conv1d(width, width, 7, stride=2, padding=3) for _ in range(3)])
        self.norms = nn.ModuleList([nn.BatchNorm1d(width) for _ in range(3)])
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        x = F.relu(self.first(x))
        for conv, norm in zip(self.blocks, self.norms):
            x = F.relu(norm(conv(x)))
        return self.head(x.amax(2)).squeeze(1)


@torch.no_grad()
def validate(model, loader):
    model.eval()
    predicted, true = zip(*[(model(x), y) for x, y in loader])
    model.train()
    return torch.corrcoef(torch.stack([torch.cat(predicted), torch.cat(true)]))[0, 1].item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequences", type=int, default=3328)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    sequences, activity = simulate(args.sequences, 1500)
    dataset = Promoters(sequences, activity, encode_fast if args.fixed else encode)
    training, held_out = random_split(dataset, [args.sequences - 256, 256])
    loader = DataLoader(training, 64, shuffle=True, drop_last=True)
    validation = DataLoader(held_out, 128)
    model = ActivityNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    spent = step = 0
    for epoch in range(3):
        began = time.perf_counter()
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 40 == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)
        spent += time.perf_counter() - began
        print(f"epoch {epoch} loss {loss.item():.4f} correlation {validate(model, validation):.3f}", flush=True)
    print(f"{spent / step * 1e3:.2f} ms per step")


if __name__ == "__main__":
    main()
