"""A graph network on batches of small graphs, one after the other. --fixed: all of a batch as one graph."""

import torch
import torch.nn.functional as F
from clock import Clock, options
from torch import Tensor, nn

args = options(steps=70)
width, layers, batch = (16, 2, 4) if args.tiny else (128, 4, 32)
Graph = tuple[Tensor, Tensor, Tensor]  # nodes, edges, and the graph that each node is of


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.sent = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        received = torch.zeros_like(nodes).index_add(0, edges[1], self.sent(nodes)[edges[0]])
        return F.relu(self.own(nodes) + received)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(layers)), nn.Linear(width, 2)

    def forward(self, graph: Graph, graphs: int) -> Tensor:
        nodes, edges, of = graph
        for layer in self.layers:
            nodes = layer(nodes, edges)
        return self.head(nodes.new_zeros(graphs, width).index_add(0, of, nodes))


def draw() -> Graph:
    count = int(torch.randint(10, 40, ()))
    nodes, edges, of = torch.randn(count, width), torch.randint(count, (2, 3 * count)), torch.zeros(count).long()
    return nodes.to(args.device), edges.to(args.device), of.to(args.device)


def joined(graphs: list[Graph]) -> Graph:
    before = torch.tensor([0, *(len(nodes) for nodes, _, _ in graphs[:-1])]).cumsum(0).tolist()
    nodes = torch.cat([nodes for nodes, _, _ in graphs])
    edges = torch.cat([edges + first for (_, edges, _), first in zip(graphs, before, strict=True)], 1)
    return nodes, edges, torch.cat([of + n for n, (_, _, of) in enumerate(graphs)])


batches = [[draw() for _ in range(batch)] for _ in range(8)]
whole = [joined(graphs) for graphs in batches]
labels = torch.randint(2, (batch,), device=args.device)
model = Network().to(args.device)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
clock = Clock(args)
number = 0
while True:
    if args.fixed:
        scores = model(whole[number % 8], batch)
    else:
        scores = torch.cat([model(graph, 1) for graph in batches[number % 8]])  # the cause
    loss = F.cross_entropy(scores, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    number += 1
    if not clock.step():
        break
