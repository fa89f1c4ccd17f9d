"""A bag-of-words classifier of news articles, from the reading of its corpus on. --fixed: the remedy."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from clock import FIXED, Clock
from torch import nn

TOPICS, PICKED = 6, 64


def write_corpus(path, articles=1_500, words=9_000):
    rng = np.random.default_rng(0)
    lexicon = np.array(["".join(rng.choice(list("abcdefghijklmnop"), 7)) for _ in range(words)])
    shares = 1 / np.arange(20, words + 20) ** 0.7
    orders = [rng.permutation(words) for _ in range(TOPICS)]
    with path.open("w") as file:
        for topic in rng.integers(0, TOPICS, articles):
            drawn = orders[topic][rng.choice(words, 60, p=shares / shares.sum())]
            file.write(f"{topic}\t{' '.join(lexicon[drawn])}\n")


class Vocabulary:
    def __init__(self):
        self.words = []
        self.ids = {}

    def id_of(self, word):
        if FIXED:
            return self.ids.setdefault(word, len(self.ids))
        if word not in self.words:  # the cause
            self.words.append(word)
        return self.words.index(word)  # the cause

    def __len__(self):
        return len(self.ids) if FIXED else len(self.words)


def read_corpus(path):
    vocabulary = Vocabulary()
    articles, topics = [], []
    with path.open() as file:
        for line in file:
            topic, text = line.rstrip().split("\t")
            articles.append([vocabulary.id_of(word) for word in text.split()])  # the cause
            topics.append(int(topic))
    return torch.tensor(articles), torch.tensor(topics), len(vocabulary)


class TopicModel(nn.Module):
    def __init__(self, words, width=64):
        super().__init__()
        self.bag = nn.EmbeddingBag(words, width, mode="mean")
        self.layers = nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, TOPICS))

    def forward(self, articles):
        return self.layers(self.bag(articles))


with tempfile.TemporaryDirectory() as name:
    path = Path(name) / "articles.tsv"
    write_corpus(path)
    articles, topics, words = read_corpus(path)
model = TopicModel(words)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
clock = Clock(300, warm=0)
running = True
while running:
    rows = torch.randint(len(articles), (PICKED,))
    loss = nn.functional.cross_entropy(model(articles[rows]), topics[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    running = clock.step()
print(f"loss {loss.item():.4f} words {words}")
