"""Before every epoch, each user's negatives are drawn from a list of all else. --fixed: drawn at once, as arrays."""

import numpy as np
import torch
from clock import FIXED, Clock
from torch import nn

USERS, ITEMS, LIKED, NEGATIVES = 2_500, 4_000, 4, 3


class Interactions:
    """Who liked what; with new negatives for each epoch."""

    def __init__(self, seed=0):
        self.rng = np.random.default_rng(seed)
        self.liked = [self.rng.choice(ITEMS, LIKED, replace=False) for _ in range(USERS)]
        self.items = set(range(ITEMS))
        self.keys = np.sort(np.concatenate([user * ITEMS + liked for user, liked in enumerate(self.liked)]))

    def positives(self):
        users = np.repeat(np.arange(USERS), LIKED)
        return users, np.concatenate(self.liked)

    def negatives(self):
        """Draw items which a user has not liked."""
        users, items = [], []
        for user, liked in enumerate(self.liked):
            others = list(self.items - set(liked.tolist()))  # the cause
            drawn = self.rng.choice(others, LIKED * NEGATIVES, replace=False)  # the cause
            users.extend([user] * len(drawn))
            items.extend(drawn.tolist())
        return np.array(users), np.array(items)

    def negatives_at_once(self):
        users = np.repeat(np.arange(USERS), LIKED * NEGATIVES)
        items = self.rng.integers(0, ITEMS, len(users))
        while True:
            at = np.searchsorted(self.keys, users * ITEMS + items).clip(max=len(self.keys) - 1)
            wrong = np.flatnonzero(self.keys[at] == users * ITEMS + items)
            if not len(wrong):
                return users, items
            items[wrong] = self.rng.integers(0, ITEMS, len(wrong))

    def epoch(self):
        users, items = self.positives()
        no_users, no_items = self.negatives_at_once() if FIXED else self.negatives()  # the cause
        labels = np.zeros(len(users) + len(no_users), np.float32)
        labels[: len(users)] = 1
        order = self.rng.permutation(len(labels))
        columns = (np.concatenate([users, no_users]), np.concatenate([items, no_items]), labels)
        return [torch.from_numpy(column[order]) for column in columns]


class NeuMF(nn.Module):
    """Factors and a small network side by side."""

    def __init__(self, width=16):
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, width), nn.Embedding(ITEMS, width)
        self.user_factors, self.item_factors = nn.Embedding(USERS, width), nn.Embedding(ITEMS, width)
        self.mlp = nn.Sequential(nn.Linear(2 * width, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU())
        self.head = nn.Linear(2 * width, 1)
        for table in (self.users, self.items, self.user_factors, self.item_factors):
            nn.init.normal_(table.weight, std=0.01)

    def forward(self, user, item):
        deep = self.mlp(torch.cat([self.users(user), self.items(item)], 1))
        wide = self.user_factors(user) * self.item_factors(item)
        return self.head(torch.cat([deep, wide], 1)).squeeze(1)


def train(batch_size=1_024):
    data = Interactions()
    model = NeuMF()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    clock = Clock(350)
    while True:
        user, item, label = data.epoch()
        for rows in torch.arange(len(label)).split(batch_size):
            loss = nn.functional.binary_cross_entropy_with_logits(model(user[rows], item[rows]), label[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not clock.step():
                return


train()
