"""Click-through of flight offers, a wide cross network with accumulated gradients, on two ranks."""

import argparse
import contextlib
import gc
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@dataclass
class Config:
    fields: int = 24
    values: int = 3000
    dim: int = 16
    hidden: int = 1024
    micro_batch: int = 64
    accumulate: int = 4
    lr: float = 1e-3
    seed: int = 0


class CrossLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, first, x):
        return first * self.mix(x) + x


class OfferNet(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config.fields * config.dim
        self.table = nn.Embedding(config.fields * config.values, config.dim)
        self.register_buffer("shift", torch.arange(config.fields) * config.values, persistent=False)
        self.crosses = nn.ModuleList(CrossLayer(width) for _ in range(2))
        self.deep = nn.Sequential(
            nn.Linear(width, config.hidden), nn.ReLU(), nn.Linear(config.hidden, config.hidden), nn.ReLU()
        )
        self.head = nn.Linear(width + config.hidden, 1)

    def forward(self, offers):
        first = x = self.table(offers + self.shift).flatten(1)
        for cross in self.crosses:
            x = cross(first, x)
        return self.head(torch.cat([x, self.deep(first)], 1)).squeeze(1)


class Trainer:
    def __init__(self, config, fixed):
        self.config, self.fixed = config, fixed
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(config.seed)
        self.model = DistributedDataParallel(OfferNet(config), forward_sync_buffers=False, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=config.lr, momentum=0.9)
        self.criterion = nn.BCEWithLogitsLoss()
        self.draws = torch.Generator().manual_seed(config.seed + 10 + self.rank)

    def offers(self):
        c = self.config
        offers = torch.randint(c.values, (c.micro_batch, c.fields), generator=self.draws)
        return offers, ((offers[:, 0] + offers[:, 1]) % 2).float()

    def held_back(self, micro):
        last = micro == self.config.accumulate - 1
        return contextlib.nullcontext() if last else self.model.no_sync()

    def micro_step(self, micro):
        offers, clicked = self.offers()
        if self.fixed:
            with self.held_back(micro):
                loss = self.criterion(self.model(offers), clicked) / self.config.accumulate
                loss.backward()
            return loss.detach()
        loss = self.criterion(self.model(offers), clicked) / self.config.accumulate  # the cause
        with self.held_back(micro):  # the cause
            loss.backward()
        return loss.detach()

    def step(self):
        self.optimizer.zero_grad()
        loss = sum(self.micro_step(micro) for micro in range(self.config.accumulate))
        self.optimizer.step()
        return loss

    def fit(self, steps):
        for step in range(steps):
            if step == 10:
                start = time.perf_counter()
            loss = self.step()
        took = (time.perf_counter() - start) / (steps - 10)
        dist.all_reduce(loss)
        if self.rank == 0:
            print(f"{1e3 * took:.2f} ms per step\nloss {loss.item() / self.world:.6f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Trainer(Config(), args.fixed).fit(args.steps)
    gc.collect()
    dist.destroy_process_group()
