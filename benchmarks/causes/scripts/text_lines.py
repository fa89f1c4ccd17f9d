"""Corrects what a scanner misread in lines of print, character by character, with a recurrent encoder and decoder."""

import argparse
import random
import string
import time

import torch
import torch.nn.functional as F
from torch import nn

ALPHABET = "\0\1" + string.ascii_lowercase + " .,-'"
INDEX = {character: number for number, character in enumerate(ALPHABET)}
CONFUSED = {"e": "c", "l": "i", "m": "n", "h": "b", "u": "v", "o": "c", "t": "f", "g": "q"}


def printed_lines(count, rng):
    syllables = [a + b for a in "bcdfghlmnprst" for b in ("a", "e", "i", "o", "u", "en", "al", "or")]
    lexicon = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(500)]
    for _ in range(count):
        words = rng.choices(lexicon, k=rng.randint(8, 12))
        yield " ".join(words)[:63] + "."


def misread(line, rng):
    scanned = []
    for character in line:
        draw = rng.random()
        if draw < 0.15:
            scanned.append(CONFUSED.get(character, character))
        elif draw < 0.18:
            scanned.append(character * 2)
        elif draw > 0.02:
            scanned.append(character)
    return "".join(scanned)


def encode(lines):
    rows = [torch.tensor([1] + [INDEX[c] for c in line]) for line in lines]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def decode(rows):
    return ["".join(ALPHABET[i] for i in row if i > 1) for row in rows.tolist()]


def edit_distance(a, b):
    previous = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        current = [i]
        for j, y in enumerate(b, 1):
            current.append(min(previous[j] + 1, current[j - 1] + 1, previous[j - 1] + (x != y)))
        previous = current
    return previous[-1]


class ErrorRates:
    """Character and word error rates of the lines seen since the last reset."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.errors, self.length, self.word_errors, self.words = 0, 0, 0, 0

    def update(self, predicted, truth):
        for ours, right in zip(predicted, truth):
            self.errors += edit_distance(ours, right)  # the cause
            self.length += len(right)
            self.word_errors += edit_distance(ours.split(), right.split())
            self.words += len(right.split())

    def compute(self):
        return self.errors / self.length, self.word_errors / self.words


class Corrector(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), 32, padding_idx=0)
        self.encoder = nn.GRU(32, width // 2, batch_first=True, bidirectional=True)
        self.decoder = nn.GRU(32, width, batch_first=True)
        self.query, self.head = nn.Linear(width, width), nn.Linear(2 * width, len(ALPHABET))

    def forward(self, scanned, target):
        memory, _ = self.encoder(self.embedding(scanned))
        states, _ = self.decoder(self.embedding(target))
        scores = self.query(states) @ memory.transpose(1, 2) / memory.shape[2] ** 0.5
        scores = scores.masked_fill((scanned == 0).unsqueeze(1), -1e9)
        return self.head(torch.cat([states, scores.softmax(2) @ memory], dim=2))


class Trainer:
    def __init__(self, args):
        self.args, rng = args, random.Random(0)
        lines = list(printed_lines(args.lines, rng))
        self.scanned, self.truth = encode([misread(line, rng) for line in lines]), encode(lines)
        self.model = Corrector(args.width)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-3)
        self.rates, self.step = ErrorRates(), 0

    def train_step(self, scanned, truth):
        logits = self.model(scanned, truth[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), truth[:, 1:].flatten(), ignore_index=0)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        report = self.step % self.args.report == 0
        if report or not self.args.fixed:  # the cause
            self.rates.reset()
            predicted = logits.argmax(2).masked_fill(truth[:, 1:] == 0, 0)
            self.rates.update(decode(predicted), decode(truth[:, 1:]))
            cer, wer = self.rates.compute()
        if report:
            print(f"step {self.step} loss {loss.item():.4f} cer {cer:.3f} wer {wer:.3f}", flush=True)

    def fit(self):
        for _ in range(self.args.epochs):
            for rows in torch.randperm(len(self.truth)).split(self.args.batch):
                self.train_step(self.scanned[rows], self.truth[rows])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lines", type=int, default=1800)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--report", type=int, default=25)
    parser.add_argument("--fixed", action="store_true")
    torch.manual_seed(0)
    trainer = Trainer(parser.parse_args())
    began = time.perf_counter()
    trainer.fit()
    print(f"{(time.perf_counter() - began) / trainer.step * 1e3:.2f} ms per step")
