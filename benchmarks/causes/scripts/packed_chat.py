"""Supervised fine-tuning on conversations that are packed into rows of a fixed length before the training."""

import argparse
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

begun = time.perf_counter()


@dataclass
class SFTConfig:
    conversations: int = 36000
    row_length: int = 512
    vocabulary: int = 2000
    width: int = 64
    layers: int = 2
    batch: int = 4
    lr: float = 1e-3
    steps: int = 60
    tree: bool = False


@dataclass
class Room:
    """The rooms left in the rows, with a tree of maxima above them: finds the first row with enough."""

    capacity: int
    leaves: int = 1
    tree: list = field(default_factory=lambda: [0, 0])

    def __post_init__(self):
        while self.leaves < self.capacity:
            self.leaves *= 2
        self.tree = [0] * (2 * self.leaves)

    def set(self, row, room):
        node = row + self.leaves
        self.tree[node] = room
        while node > 1:
            node //= 2
            self.tree[node] = max(self.tree[2 * node], self.tree[2 * node + 1])

    def first(self, length):
        if self.tree[1] < length:
            return None
        node = 1
        while node < self.leaves:
            node = 2 * node if self.tree[2 * node] >= length else 2 * node + 1
        return node - self.leaves


def pack(lengths, row_length, tree):
    """First fit, the longest first: lists of the conversations in each row."""
    rows, room, rooms = [], [], Room(len(lengths)) if tree else None
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if tree:
            place = rooms.first(length)
        else:
            place = next((row for row, left in enumerate(room) if left >= length), None)  # the cause
        if place is None:
            place = len(rows)
            rows.append([])
            room.append(row_length)
        rows[place].append(index)
        room[place] -= length
        if tree:
            rooms.set(place, room[place])
    return rows


class PackedDataset:
    def __init__(self, config, seed=0):
        rng = np.random.default_rng(seed)
        lengths = np.clip(rng.lognormal(4.6, 0.7, config.conversations), 8, config.row_length).astype(int)
        self.starts = np.concatenate([[0], lengths.cumsum()])
        self.tokens = (np.arange(self.starts[-1]) * 31 % 997 + rng.integers(0, 9, self.starts[-1])).astype(np.int64)
        self.rows = pack(lengths.tolist(), config.row_length, config.tree)
        self.row_length = config.row_length

    def row(self, index):
        tokens, part = np.zeros(self.row_length, np.int64), np.full(self.row_length, -1)
        at = 0
        for number, conversation in enumerate(self.rows[index]):
            text = self.tokens[self.starts[conversation] : self.starts[conversation + 1]]
            tokens[at : at + len(text)], part[at : at + len(text)] = text, number
            at += len(text)
        return torch.from_numpy(tokens), torch.from_numpy(part)


class ChatModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(config.width, 4, 4 * config.width, 0.0, batch_first=True, norm_first=True)
            for _ in range(config.layers)
        )
        self.head = nn.Linear(config.width, config.vocabulary)

    def forward(self, tokens, part):
        apart = (part[:, :, None] != part[:, None]) | torch.ones(tokens.shape[1], tokens.shape[1]).triu(1).bool()
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, src_mask=apart.repeat_interleave(4, 0))
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=SFTConfig.steps)
    args = parser.parse_args()
    config = SFTConfig(steps=args.steps, tree=args.fixed)
    torch.manual_seed(0)
    data = PackedDataset(config)
    print(f"{config.conversations} conversations in {len(data.rows)} rows")
    model = ChatModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, fused=True)
    for _ in range(config.steps):
        chosen = torch.randint(len(data.rows), (config.batch,)).tolist()
        tokens, part = (torch.stack(column) for column in zip(*map(data.row, chosen)))
        targets = tokens[:, 1:].masked_fill((part[:, 1:] != part[:, :-1]) | (part[:, 1:] < 0), -100)
        loss = nn.functional.cross_entropy(model(tokens, part)[:, :-1].flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ended = time.perf_counter()
    print(f"{(ended - begun) / config.steps * 1e3:.2f} ms per step")
    print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
