"""Recommends the next item of a shopping session with a GRU, trained by BPR against sampled items."""

import argparse
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_sessions(count, length, items, seed=0):
    """Sessions that wander among neighbouring items, the popular ones more often."""
    rng = np.random.default_rng(seed)
    start = (items * rng.random(count) ** 2).astype(np.int64)
    walk = rng.integers(-3, 4, (count, length)).cumsum(1)
    return torch.from_numpy((start[:, None] + walk) % items)


class SessionGRU(nn.Module):
    def __init__(self, items, embed_dim, hidden):
        super().__init__()
        self.items = items
        self.embed = nn.Linear(items, embed_dim, bias=False)
        self.gru = nn.GRU(embed_dim, hidden, batch_first=True)
        self.project = nn.Linear(hidden, embed_dim)
        self.output = nn.Embedding(items, embed_dim)
        nn.init.normal_(self.embed.weight, std=0.05)
        nn.init.normal_(self.output.weight, std=0.05)

    def embed_items(self, sessions):
        one_hot = F.one_hot(sessions, self.items).float()  # the cause
        return self.embed(one_hot)  # the cause

    def forward(self, sessions):
        hidden, _ = self.gru(self.embed_items(sessions))
        return self.project(hidden[:, -1])

    def score(self, wanted, candidates):
        return (self.output(candidates) * wanted.unsqueeze(1)).sum(-1)


class SessionGRULookup(SessionGRU):
    def __init__(self, items, embed_dim, hidden):
        super().__init__(items, embed_dim, hidden)
        self.embed = nn.Embedding.from_pretrained(self.embed.weight.detach().t().contiguous(), freeze=False)

    def embed_items(self, sessions):
        return self.embed(sessions)


def bpr(scores):
    """The first candidate is the true one."""
    return -F.logsigmoid(scores[:, :1] - scores[:, 1:]).mean()


@torch.no_grad()
def recall(model, sessions, k=20):
    model.eval()
    wanted = model(sessions[:, :-1])
    best = (wanted @ model.output.weight.t()).topk(k, dim=1).indices
    model.train()
    return (best == sessions[:, -1:]).any(1).float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--items", type=int, default=8000)
    parser.add_argument("--length", type=int, default=13)
    parser.add_argument("--batch_size", type=int, default=50)
    parser.add_argument("--negatives", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    sessions = make_sessions(6200, args.length, args.items)
    loader = DataLoader(TensorDataset(sessions[:6000]), args.batch_size, shuffle=True, drop_last=True)
    held_out = sessions[6000:]
    model = (SessionGRULookup if args.fixed else SessionGRU)(args.items, embed_dim=64, hidden=100)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    seconds = step = 0
    for epoch in range(args.epochs):
        began = time.perf_counter()
        for (batch,) in loader:
            negatives = torch.randint(args.items, (len(batch), args.negatives))
            candidates = torch.cat([batch[:, -1:], negatives], 1)
            loss = bpr(model.score(model(batch[:, :-1]), candidates))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 60 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.5f}", flush=True)
        seconds += time.perf_counter() - began
        print(f"epoch {epoch} recall@20 {recall(model, held_out):.3f}", flush=True)
    print(f"{seconds / step * 1e3:.2f} ms per step")


if __name__ == "__main__":
    main()
