"""Learns one task after another; what mattered for the past ones is held fast. --fixed: the remedy."""

import torch
import torch.nn.functional as F
from clock import FIXED, Clock
from torch import nn

PIXELS, CLASSES, BATCH, TASKS, PER_TASK = 784, 10, 96, 12, 40
SAMPLES, STRENGTH, DECAY = 768, 50.0, 0.9


class Task:
    """The same ten classes, the pixels in another order."""

    def __init__(self, prototypes, number):
        rng = torch.Generator().manual_seed(number)
        self.prototypes = prototypes[:, torch.randperm(PIXELS, generator=rng)]

    def batch(self, size):
        label = torch.randint(CLASSES, (size,))
        return self.prototypes[label] + torch.randn(size, PIXELS), label


class Perceptron(nn.Module):
    def __init__(self, width=320):
        super().__init__()
        sizes = [PIXELS, width, width, CLASSES]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))

    def trace(self, x):
        """What each layer is given, and what it answers before its ReLU."""
        given, answers = [], []
        for layer in self.layers:
            given.append(F.relu(answers[-1]) if answers else x)
            answers.append(layer(given[-1]))
        return given, answers

    def forward(self, x):
        return self.trace(x)[1][-1]


class Consolidation:
    def __init__(self, model):
        self.model, self.anchor, self.importance = model, None, None

    def fisher(self, x, label):
        """The mean over samples of the squared gradient of the log-likelihood, for each parameter."""
        if FIXED:
            given, answers = self.model.trace(x)
            deltas = torch.autograd.grad(F.cross_entropy(answers[-1], label, reduction="sum"), answers)
            pairs = [((d**2).T @ (a.detach() ** 2), (d**2).sum(0)) for d, a in zip(deltas, given)]
            return [each / len(x) for pair in pairs for each in pair]
        total = [torch.zeros_like(parameter) for parameter in self.model.parameters()]
        for one, target in zip(x.split(1), label.split(1)):  # the cause
            loss = F.cross_entropy(self.model(one), target)
            for each, grad in zip(total, torch.autograd.grad(loss, list(self.model.parameters()))):  # the cause
                each.addcmul_(grad, grad)
        return [each / len(x) for each in total]

    def end_task(self, task):
        fisher = self.fisher(*task.batch(SAMPLES))
        if self.importance is not None:
            fisher = [new + DECAY * old for new, old in zip(fisher, self.importance)]
        self.importance = fisher
        self.anchor = [parameter.detach().clone() for parameter in self.model.parameters()]

    def penalty(self):
        if self.anchor is None:
            return 0.0
        parts = zip(self.model.parameters(), self.anchor, self.importance)
        return 0.5 * sum((weight * (now - then) ** 2).sum() for now, then, weight in parts)


prototypes = torch.randn(CLASSES, PIXELS) * 0.5
model = Perceptron()
consolidation = Consolidation(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
clock = Clock(TASKS * PER_TASK)
for number in range(TASKS):
    task = Task(prototypes, number)
    for _ in range(PER_TASK):
        x, label = task.batch(BATCH)
        loss = F.cross_entropy(model(x), label) + STRENGTH * consolidation.penalty()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.step()
    if number + 1 < TASKS:
        consolidation.end_task(task)
    print(f"task {number} loss {loss.item():.5f}")
