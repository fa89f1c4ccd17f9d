"""Forecasts of beehive weights from the records of an apiary, with callbacks."""

import argparse
import gc
import random
import time

import torch
from torch import nn


class Callback:
    def on_step_end(self, trainer):
        pass


class RunningLoss(Callback):
    def __init__(self, keep=0.98):
        self.keep, self.value = keep, None

    def on_step_end(self, trainer):
        loss = trainer.loss.item()
        self.value = loss if self.value is None else self.keep * self.value + (1 - self.keep) * loss


class MemoryWatch(Callback):
    """Warns when the tensors that are alive take more and more room."""

    def __init__(self, every=1, slack=1.5):
        self.every, self.slack, self.first = every, slack, None

    def on_step_end(self, trainer):
        if trainer.step % self.every:
            return
        alive = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]  # the cause
        room = sum(t.numel() * t.element_size() for t in alive)
        if trainer.step >= 5:
            self.first = self.first or room
            if room > self.slack * self.first:
                print(f"step {trainer.step}: {len(alive)} tensors take {room / 2**20:.1f} MiB")


class Apiary(torch.utils.data.Dataset):
    """One record a hive and day, as they come from the scales."""

    def __init__(self, hives=150, days=400, window=28, seed=6):
        rng = random.Random(seed)
        self.days, self.window = days, window
        self.hives = []
        for _ in range(hives):
            weight, records = rng.uniform(25, 45), []
            for day in range(days):
                weight += rng.gauss(0.05 if day % 365 < 180 else -0.05, 0.3)
                records.append({"day": day, "weight": weight, "air": {"t": rng.gauss(15, 8), "rh": rng.random()}})
            self.hives.append(records)

    def __len__(self):
        return len(self.hives) * (self.days - self.window)

    def __getitem__(self, index):
        hive, first = divmod(index, self.days - self.window)
        records = self.hives[hive][first : first + self.window + 1]
        rows = [[r["weight"] / 40, r["air"]["t"] / 20, r["air"]["rh"]] for r in records]
        return torch.tensor(rows[:-1]), torch.tensor(rows[-1][0])


class Forecaster(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.rnn = nn.GRU(3, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        return x[:, -1, 0] + self.head(self.rnn(x)[0][:, -1]).squeeze(1)


class Trainer:
    def __init__(self, model, loader, callbacks, lr=1e-3):
        self.model, self.loader, self.callbacks = model, loader, callbacks
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        self.step = 0

    def fit(self, steps):
        while self.step < steps:
            for x, y in self.loader:
                if self.step == 10:
                    start = time.perf_counter()
                self.loss = nn.functional.huber_loss(self.model(x), y)
                self.optimizer.zero_grad()
                self.loss.backward()
                self.optimizer.step()
                for callback in self.callbacks:
                    callback.on_step_end(self)
                self.step += 1
                if self.step == steps:
                    break
        print(f"{(time.perf_counter() - start) / (steps - 10) * 1e3:.2f} ms per step")
        print(f"loss {self.loss.item():.6f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=250)
    args = parser.parse_args()
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(Apiary(), batch_size=64, shuffle=True, drop_last=True)
    Trainer(Forecaster(), loader, [RunningLoss(), MemoryWatch(every=500 if args.fixed else 1)]).fit(args.steps)
