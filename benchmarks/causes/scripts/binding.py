"""Predicts from fingerprints of molecules to which of some proteins they bind."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn

ASSAYS = 12


def fingerprints(count, bits, generator):
    """Sparse fingerprints as lists of set bits, hashed from fragments, and noisy, partly missing measurements."""
    fragments = torch.randint(bits, (400, 6), generator=generator)
    taken = torch.randint(400, (count, 12), generator=generator)
    effects = torch.randn(400, ASSAYS, generator=generator)
    strength = effects[taken].mean(1) * 3
    binds = (torch.rand(count, ASSAYS, generator=generator) < torch.sigmoid(strength)).float()
    measured = torch.rand(count, ASSAYS, generator=generator) < 0.6
    return fragments[taken].flatten(1), binds, measured


def dense(set_bits, bits):
    return torch.zeros(len(set_bits), bits).scatter_(1, set_bits, 1.0)


class Assays(nn.Module):
    def __init__(self, bits, width, dropout=0.2):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(bits, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(width, width // 2),
            nn.ReLU(),
            nn.Dropout(dropout),
        )
        self.heads = nn.Linear(width // 2, ASSAYS)

    def forward(self, x):
        return self.heads(self.trunk(x))


def masked_loss(logits, binds, measured):
    losses = F.binary_cross_entropy_with_logits(logits, binds, reduction="none")
    return (losses * measured).sum() / measured.sum()


def l2_penalty(model):
    """Half the sum of the squares of all parameters."""
    penalty = 0.0
    for parameter in model.parameters():
        penalty = penalty + torch.norm(parameter, 2) ** 2  # the cause
    return 0.5 * penalty


@torch.no_grad()
def evaluate(model, set_bits, binds, measured, bits):
    model.eval()
    right, total = 0, 0
    for rows in torch.arange(len(set_bits)).split(256):
        hits = (model(dense(set_bits[rows], bits)) > 0) == (binds[rows] > 0)
        right += (hits & measured[rows]).sum()
        total += measured[rows].sum()
    model.train()
    return (right / total).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--molecules", type=int, default=1800)
    parser.add_argument("--bits", type=int, default=4096)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--decay", type=float, default=1e-4)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    set_bits, binds, measured = fingerprints(args.molecules, args.bits, generator)
    order = torch.randperm(args.molecules, generator=generator)
    held, train = order[: args.molecules // 9], order[args.molecules // 9 :]
    model = Assays(args.bits, args.width)
    decay = args.decay if args.fixed else 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=decay)
    step, began = 0, time.perf_counter()
    for epoch in range(args.epochs):
        shuffled = train[torch.randperm(len(train), generator=generator)]
        for rows in shuffled.split(args.batch):
            logits = model(dense(set_bits[rows], args.bits))
            fit = masked_loss(logits, binds[rows], measured[rows])
            loss = fit
            if not args.fixed:
                loss = loss + args.decay * l2_penalty(model)  # the cause
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 25 == 0:
                print(f"epoch {epoch} step {step} loss {fit.item():.4f}", flush=True)
        score = evaluate(model, set_bits[held], binds[held], measured[held], args.bits)
        print(f"epoch {epoch} held-out accuracy {score:.3f}", flush=True)
    print(f"{(time.perf_counter() - began) / step * 1e3:.2f} ms per step")


if __name__ == "__main__":
    main()
