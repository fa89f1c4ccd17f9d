"""Frame classifier for hybrid speech recognition: filter banks with their context in, senone labels out."""

import argparse
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

MELS, LEFT, RIGHT, SENONES = 80, 10, 10, 400
CONTEXT = LEFT + 1 + RIGHT


def context_window(features, left, right):
    """Sets every frame beside its neighbours: (frames, mels) -> (frames, context * mels); the ends are repeated."""
    frames = len(features)
    padded = np.pad(features, ((left, right), (0, 0)), mode="edge")
    return np.concatenate([padded[lag : lag + frames] for lag in range(left + 1 + right)], axis=1)


class Utterances(Dataset):
    def __init__(self, count, whole, seed=0):
        rng = np.random.default_rng(seed)
        self.whole = whole
        self.features = [rng.normal(size=(int(n), MELS)).astype(np.float32) for n in rng.integers(220, 380, count)]
        weights = rng.normal(size=(MELS, SENONES)).astype(np.float32)
        self.labels = [(f @ weights).argmax(1) for f in self.features]

    def __len__(self):
        return len(self.features)

    def __getitem__(self, index):
        features = self.features[index]
        features = (features - features.mean(0)) / (features.std(0) + 1e-5)
        if self.whole:
            features = context_window(features, LEFT, RIGHT)  # the cause
        return torch.from_numpy(features), torch.from_numpy(self.labels[index])


def pad_batch(samples):
    features, labels = zip(*samples)
    return (
        nn.utils.rnn.pad_sequence(features, batch_first=True),  # the cause
        nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100),
        torch.tensor([len(f) for f in features]),
    )


class AcousticModel(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.first = nn.Linear(CONTEXT * MELS, width)
        self.rest = nn.Sequential(
            nn.ReLU(), nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width)
        )
        self.senones = nn.Linear(width, SENONES)

    def spliced(self, features, lengths):
        """The first layer over frames without context: the same weights, one frame offset after the other."""
        frames = features.shape[1]
        where = torch.arange(-LEFT, frames + RIGHT).clamp(min=0) - torch.zeros(len(lengths), 1, dtype=torch.long)
        where = torch.minimum(where, lengths[:, None] - 1)
        padded = features.gather(1, where[..., None].expand(-1, -1, MELS)).transpose(1, 2)
        weight = self.first.weight.view(-1, CONTEXT, MELS).transpose(1, 2)
        return nn.functional.conv1d(padded, weight, self.first.bias).transpose(1, 2)

    def forward(self, features, lengths):
        first = self.first(features) if features.shape[-1] > MELS else self.spliced(features, lengths)
        return self.senones(self.rest(first))


class Recipe:
    def __init__(self, args):
        torch.manual_seed(args.seed)
        self.steps = args.steps
        self.loader = DataLoader(
            Utterances(320, whole=not args.fixed),
            batch_size=16,
            shuffle=True,
            drop_last=True,
            num_workers=1,
            persistent_workers=True,
            collate_fn=pad_batch,
        )
        self.model = AcousticModel()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def batches(self):
        while True:
            yield from self.loader

    def run(self):
        for step, (features, labels, lengths) in zip(range(self.steps), self.batches()):
            if step == 10:
                start = time.perf_counter()
            scores = self.model(features, lengths)
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        print(f"{(time.perf_counter() - start) / (self.steps - 10) * 1e3:.2f} ms per step")
        print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    Recipe(parser.parse_args()).run()
