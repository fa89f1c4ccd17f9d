"""The sum of the losses so far is back-propagated at each of six parts. --fixed: each part's own loss is."""

import argparse

import torch
from clock import Clock
from torch import nn

PARTS = 6


class Cell(nn.Module):
    """A field one step of time later, by a learned stencil."""

    def __init__(self, channels=2, hidden=12):
        super().__init__()
        self.wide = nn.Conv2d(channels, hidden, 5, padding=2, padding_mode="circular")
        self.narrow = nn.Conv2d(hidden, channels, 1)

    def forward(self, state):
        return state + 0.1 * self.narrow(torch.tanh(self.wide(state)))


class Simulator(nn.Module):
    def __init__(self, steps=4):
        super().__init__()
        self.cell, self.steps = Cell(), steps

    def forward(self, state):
        states = []
        for _ in range(self.steps):
            state = self.cell(state)
            states.append(state)
        return torch.stack(states, 1)


def reference(batch, side=24, steps=4):
    """Give a starting field, and how it spreads."""
    state = torch.rand(batch, 2, side, side)
    states, now = [], state
    for _ in range(steps):
        around = sum(now.roll(shift, dim) for shift in (-1, 1) for dim in (2, 3))
        now = now + 0.1 * (around - 4 * now)
        states.append(now)
    return state, torch.stack(states, 1)


def accumulate_sum(model, parts):
    total = 0.0
    for state, wanted in parts:
        loss = nn.functional.mse_loss(model(state), wanted) / len(parts)
        total = total + loss
        total.backward(retain_graph=True)  # the cause
    return total.detach()


def accumulate_each(model, parts):
    total = 0.0
    for state, wanted in parts:
        loss = nn.functional.mse_loss(model(state), wanted) / len(parts)
        loss.backward()
        total = total + loss.detach()
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--part-size", type=int, default=4)
    args = parser.parse_args()
    model = Simulator()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, gamma=0.95)
    data = [reference(args.part_size) for _ in range(24)]
    accumulate = accumulate_each if args.fixed else accumulate_sum
    clock = Clock(60, warm=5)
    at = 0
    while True:
        parts = [data[(at + n) % len(data)] for n in range(PARTS)]
        at += PARTS
        optimizer.zero_grad()
        accumulate(model, parts)  # the cause
        optimizer.step()
        scheduler.step()
        if not clock.step():
            break


if __name__ == "__main__":
    main()
