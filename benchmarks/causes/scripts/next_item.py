"""A recommender predicts the next item of a visit and reports how well it ranks. --fixed: the remedy."""

import torch
from clock import FIXED, Clock
from torch import nn

ITEMS, WIDTH, LENGTH, BATCH, TOP = 10_000, 48, 16, 64, 20


def ranks(scores, targets):
    """The place of each target among all items, from 0."""
    if FIXED:
        return (scores > scores.gather(1, targets[:, None])).sum(1)
    order = scores.argsort(dim=1, descending=True)  # the cause
    return (order == targets[:, None]).nonzero()[:, 1]  # the cause


class Average:
    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, scores, targets):
        self.total += self.measure(ranks(scores, targets)).sum().item()  # the cause
        self.count += len(targets)

    def compute(self):
        return self.total / max(self.count, 1)


class HitRate(Average):
    def measure(self, rank):
        return (rank < TOP).float()


class NDCG(Average):
    def measure(self, rank):
        return (rank < TOP) / torch.log2(rank + 2.0)


class VisitModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(ITEMS, WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.bias = nn.Parameter(torch.zeros(ITEMS))

    def forward(self, visits):
        _, last = self.gru(self.items(visits))
        return last[0] @ self.items.weight.t() + self.bias


first = torch.randint(ITEMS, (3_000, 1))
visits = (first + 17 * torch.arange(LENGTH + 1)) % ITEMS
model = VisitModel()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
metrics = {"hit rate": HitRate(), "ndcg": NDCG()}
clock = Clock(80)
running = True
while running:
    batch = visits[torch.randint(len(visits), (BATCH,))]
    scores, targets = model(batch[:, :-1]), batch[:, -1]
    loss = nn.functional.cross_entropy(scores, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for metric in metrics.values():
        metric.update(scores.detach(), targets)
    running = clock.step()
print(f"loss {loss.item():.4f}", *(f"{name} {metric.compute():.4f}" for name, metric in metrics.items()))
