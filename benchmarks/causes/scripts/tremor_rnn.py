"""Recurrent network with an orthogonal transition for classifying seismic tremor windows."""

import argparse
import time

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal


class OrthogonalCell(nn.Module):
    def __init__(self, inside, hidden):
        super().__init__()
        self.drive = nn.Linear(inside, hidden)
        self.turn = orthogonal(nn.Linear(hidden, hidden, bias=False), orthogonal_map="matrix_exp")

    def forward(self, x, state):
        return torch.tanh(self.drive(x) + self.turn(state))  # the cause


class TremorNet(nn.Module):
    def __init__(self, channels=3, hidden=64, kinds=5):
        super().__init__()
        self.cell = OrthogonalCell(channels, hidden)
        self.start = nn.Parameter(torch.zeros(hidden))
        self.head = nn.Linear(hidden, kinds)

    def unroll(self, window):
        state = self.start.expand(window.shape[0], -1)
        for x in window.unbind(1):
            state = self.cell(x, state)  # the cause
        return self.head(state)

    def forward(self, window, fixed=False):
        if fixed:
            with parametrize.cached():
                return self.unroll(window)
        return self.unroll(window)


class Windows(torch.utils.data.Dataset):
    def __init__(self, count=4000, length=48, kinds=5, seed=1):
        g = torch.Generator().manual_seed(seed)
        self.kind = torch.randint(kinds, (count,), generator=g)
        t = torch.arange(length) / length
        wave = torch.sin(6.28 * (2 + 3 * self.kind[:, None]) * t + torch.rand(count, 1, generator=g))
        self.trace = wave[:, :, None] * torch.randn(count, 1, 3, generator=g) + 0.3 * torch.randn(
            count, length, 3, generator=g
        )

    def __len__(self):
        return len(self.kind)

    def __getitem__(self, index):
        return self.trace[index], self.kind[index]


class Experiment:
    def __init__(self, options):
        torch.manual_seed(options.seed)
        self.options = options
        self.net = TremorNet()
        self.loader = torch.utils.data.DataLoader(Windows(), options.batch, shuffle=True, drop_last=True)
        self.optimizer = torch.optim.RMSprop(self.net.parameters(), lr=1e-3)
        self.criterion = nn.CrossEntropyLoss()

    def batches(self):
        while True:
            yield from self.loader

    def run(self):
        for step, (trace, kind) in enumerate(self.batches()):
            if step == 10:
                start = time.perf_counter()
            if step == self.options.steps:
                break
            loss = self.criterion(self.net(trace, self.options.fixed), kind)
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.optimizer.step()
        print(f"{(time.perf_counter() - start) / (self.options.steps - 10) * 1e3:.2f} ms per step")
        print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    Experiment(parser.parse_args()).run()
