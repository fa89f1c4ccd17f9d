"""Messages are summed up node by node, by a mask of the edges. --fixed: all nodes' at once, by index_add."""

from itertools import pairwise

import torch
from clock import FIXED, Clock
from torch import nn

NODES, EDGES, WIDTH = 120, 700, 32


def mlp(*widths):
    layers = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Passing(nn.Module):
    """One round: the edges look at their ends, then the nodes at their edges."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.edge_update = mlp(3 * width, 2 * width, width)
        self.message = mlp(2 * width, width, width)
        self.node_update = mlp(2 * width, width, width)

    def gather(self, messages, target, count):
        if FIXED:
            return messages.new_zeros(count, messages.shape[1]).index_add(0, target, messages)
        sums = []
        for node in range(count):  # the cause
            incoming = messages[target == node]  # the cause
            sums.append(incoming.sum(0))  # the cause
        return torch.stack(sums)

    def forward(self, nodes, edges, source, target):
        edges = edges + self.edge_update(torch.cat([nodes[source], nodes[target], edges], 1))
        messages = self.message(torch.cat([nodes[source], edges], 1))
        gathered = self.gather(messages, target, len(nodes))
        return nodes + self.node_update(torch.cat([nodes, gathered], 1)), edges


class Matcher(nn.Module):
    """Tells which edges join the same person in two cameras."""

    def __init__(self, rounds=2):
        super().__init__()
        self.node_in, self.edge_in = mlp(16, WIDTH, WIDTH), mlp(4, WIDTH, WIDTH)
        self.rounds = nn.ModuleList(Passing() for _ in range(rounds))
        self.score = mlp(WIDTH, WIDTH, 1)

    def forward(self, graph):
        nodes, edges = self.node_in(graph["nodes"]), self.edge_in(graph["edges"])
        for layer in self.rounds:
            nodes, edges = layer(nodes, edges, graph["source"], graph["target"])
        return self.score(edges).squeeze(1)


def random_graph(generator):
    person = torch.randint(0, 30, (NODES,), generator=generator)
    source, target = torch.randint(0, NODES, (2, EDGES), generator=generator)
    looks = torch.randn(30, 16, generator=generator)
    return {
        "nodes": looks[person] + 0.3 * torch.randn(NODES, 16, generator=generator),
        "edges": torch.rand(EDGES, 4, generator=generator),
        "source": source,
        "target": target,
        "same": (person[source] == person[target]).float(),
    }


def fit(model, graphs, steps, lr=2e-3):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    clock = Clock(steps)
    while True:
        for graph in graphs:
            loss = nn.functional.binary_cross_entropy_with_logits(model(graph), graph["same"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not clock.step():
                return


numbers = torch.Generator().manual_seed(0)
fit(Matcher(), [random_graph(numbers) for _ in range(40)], steps=300)
