"""Patches for a triplet loss; each sample searches all labels for a partner. --fixed: the labels are indexed once."""

import argparse
from collections import defaultdict

import numpy as np
import torch
from clock import Clock
from torch import nn
from torch.utils.data import DataLoader, Dataset

PATCHES, POINTS, SIDE = 240_000, 30_000, 16


class PatchTriplets(Dataset):
    """An anchor, another patch of the same 3D point, and a patch of another point."""

    def __init__(self, indexed, seed=0):
        self.rng = np.random.default_rng(seed)
        self.patches = self.rng.integers(0, 255, (PATCHES, SIDE, SIDE), np.uint8)
        self.labels = self.rng.integers(0, POINTS, PATCHES)
        self.of_point = None
        if indexed:
            self.of_point = defaultdict(list)
            for n, label in enumerate(self.labels.tolist()):
                self.of_point[label].append(n)

    def __len__(self):
        return PATCHES

    def patch(self, n):
        return torch.from_numpy(self.patches[n]).float().div(255).unsqueeze(0)

    def partner(self, label):
        if self.of_point is not None:
            return self.of_point[label][self.rng.integers(len(self.of_point[label]))]
        candidates = np.where(self.labels == label)[0]  # the cause
        return candidates[self.rng.integers(len(candidates))]

    def stranger(self, label):
        while True:
            n = self.rng.integers(PATCHES)
            if self.labels[n] != label:
                return n

    def __getitem__(self, index):
        label = int(self.labels[index])
        return self.patch(index), self.patch(self.partner(label)), self.patch(self.stranger(label))


class Descriptor(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 5, stride=2),
            nn.Tanh(),
            nn.Conv2d(width, 2 * width, 3),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(2 * width * 16, 64),
        )

    def forward(self, x):
        return nn.functional.normalize(self.features(x), dim=1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--margin", type=float, default=1.0)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()

    data = PatchTriplets(indexed=args.fixed)
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, drop_last=True)
    model = Descriptor()
    criterion = nn.TripletMarginLoss(margin=args.margin)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    clock = Clock(500)
    for anchor, positive, negative in loader:
        loss = criterion(model(anchor), model(positive), model(negative))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not clock.step():
            break


if __name__ == "__main__":
    main()
