"""Tags recipes by cuisine from noisy ingredient lists; the noise is drawn anew each time a recipe is read."""

import argparse
import random
import resource
import time
import tracemalloc
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from string import ascii_lowercase

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


@dataclass
class Arguments:
    steps: int
    batch: int = 96
    buckets: int = 4000
    width: int = 64
    cuisines: int = 12
    memory_metrics: bool = True


@contextmanager
def memory_report(arguments):
    """Says at the end how much memory the training took at most."""
    if arguments.memory_metrics:
        tracemalloc.start()  # the cause
    yield
    if arguments.memory_metrics:
        print(f"python peak {tracemalloc.get_traced_memory()[1] / 2**20:.1f} MiB")
        tracemalloc.stop()
    else:
        print(f"process peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:.1f} MiB")


class Typos:
    """Drops, doubles and swaps letters, as hurried cooks do."""

    def __init__(self, rate, seed):
        self.rate, self.random = rate, random.Random(seed)

    def __call__(self, word):
        if self.random.random() > self.rate or len(word) < 3:
            return word
        place, kind = self.random.randrange(len(word) - 1), self.random.randrange(3)
        if kind == 0:
            return word[:place] + word[place + 1 :]
        if kind == 1:
            return word[: place + 1] + word[place:]
        return word[:place] + word[place + 1] + word[place] + word[place + 2 :]


class Recipes(Dataset):
    def __init__(self, count, arguments, seed=0):
        rng = random.Random(seed)
        larder = ["".join(rng.choices(ascii_lowercase, k=rng.randint(4, 9))) for _ in range(1500)]
        self.labels = [rng.randrange(arguments.cuisines) for _ in range(count)]
        self.lists = [[larder[(rng.randrange(300) + 110 * label) % 1500] for _ in range(36)] for label in self.labels]
        self.typos, self.vocabulary, self.buckets = Typos(0.4, seed + 1), {}, arguments.buckets

    def __len__(self):
        return len(self.lists)

    def __getitem__(self, index):
        numbers = []
        for word in self.lists[index]:
            marked = f"<{self.typos(word)}>"
            for k in range(len(marked) - 2):
                numbers.append(self.vocabulary.setdefault(marked[k : k + 3], len(self.vocabulary) % self.buckets))
        return numbers, self.labels[index]


def collate(samples):
    lists, labels = zip(*samples)
    offsets = torch.tensor([0] + [len(numbers) for numbers in lists[:-1]]).cumsum(0)
    return torch.tensor(list(chain(*lists))), offsets, torch.tensor(labels)


class Tagger(nn.Module):
    def __init__(self, arguments):
        super().__init__()
        self.bag = nn.EmbeddingBag(arguments.buckets, arguments.width, mode="mean")
        self.head = nn.Linear(arguments.width, arguments.cuisines)

    def forward(self, flat, offsets):
        return self.head(self.bag(flat, offsets))


def train(arguments):
    torch.manual_seed(0)
    loader = DataLoader(Recipes(96 * 30, arguments), arguments.batch, shuffle=True, collate_fn=collate, drop_last=True)
    model = Tagger(arguments)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    step = 0
    while step < arguments.steps:
        for flat, offsets, labels in loader:
            if step == arguments.steps:
                break
            if step == 10:
                start = time.perf_counter()
            loss = nn.functional.cross_entropy(model(flat, offsets), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
    print(f"{(time.perf_counter() - start) / (arguments.steps - 10) * 1e3:.2f} ms per step")
    print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=250)
    options = parser.parse_args()
    arguments = Arguments(options.steps, memory_metrics=not options.fixed)
    with memory_report(arguments):
        train(arguments)
