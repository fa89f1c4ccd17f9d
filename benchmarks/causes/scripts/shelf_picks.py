"""Next purchase in a web shop: self-attention over each customer's basket history."""

import argparse
import gc
import random
import time

import torch
from torch import nn

ITEMS, HISTORY = 3000, 20


def make_customers(count, seed):
    rng = random.Random(seed)
    customers = []
    for number in range(count):
        taste, visits = rng.randrange(60), []
        for day in range(HISTORY + 1):
            taste = taste if rng.random() < 0.8 else rng.randrange(60)
            visits.append({"item": 1 + taste * 49 + int(rng.random() ** 2 * 49), "day": day * 3})
        customers.append({"id": number, "visits": visits})
    return customers


class HistoryBatches:
    """Endless shuffled batches: items seen, days, and the item bought next."""

    def __init__(self, customers, batch, seed):
        self.customers, self.batch, self.rng = customers, batch, random.Random(seed)

    def __iter__(self):
        while True:
            rows = [c["visits"] for c in self.rng.sample(self.customers, self.batch)]
            items = torch.tensor([[v["item"] for v in visits] for visits in rows])
            days = torch.tensor([[v["day"] for v in visits[:-1]] for visits in rows])
            yield items[:, :-1], days, items[:, 1:]


class BasketModel(nn.Module):
    def __init__(self, width=64, heads=2, depth=2):
        super().__init__()
        self.item, self.day = nn.Embedding(ITEMS, width), nn.Embedding(3 * HISTORY + 3, width)
        nn.init.normal_(self.item.weight, std=0.05)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(HISTORY))

    def forward(self, items, days):
        hidden = self.encoder(self.item(items) + self.day(days), mask=self.mask, is_causal=True)
        return hidden[:, -1] @ self.item.weight.T


class Callback:
    def on_step_end(self, step, logs):
        pass


class LossMean(Callback):
    def __init__(self, decay=0.95):
        self.decay, self.value = decay, None

    def on_step_end(self, step, logs):
        loss = logs["loss"]
        self.value = loss if self.value is None else self.decay * self.value + (1 - self.decay) * loss


class TidyMemory(Callback):
    """Gives back what is no longer used."""

    def on_step_end(self, step, logs):
        gc.collect()  # the cause
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def fit(model, batches, steps, callbacks):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    began = None
    for step, (items, days, following) in zip(range(steps), batches):
        if step == steps // 2:
            began = time.perf_counter()
        loss = nn.functional.cross_entropy(model(items, days), following[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logs = {"loss": loss.item()}
        for callback in callbacks:
            callback.on_step_end(step, logs)
    return logs["loss"], (time.perf_counter() - began) / (steps - steps // 2)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=130)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--customers", type=int, default=2_500)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(3)
    batches = HistoryBatches(make_customers(args.customers, seed=1), args.batch, seed=2)
    callbacks = [LossMean()] if args.fixed else [LossMean(), TidyMemory()]
    last, seconds = fit(BasketModel(), batches, args.steps, callbacks)
    print(f"loss {last:.6f} (mean {callbacks[0].value:.4f})")
    print(f"{seconds * 1e3:.2f} ms per step")


if __name__ == "__main__":
    main()
