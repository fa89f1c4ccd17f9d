"""Sorts papers into fields from the graph of their citations alone, without words."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn


def citation_graph(papers, fields, cited, generator):
    """Papers cite mostly their own field; the edges come back both ways, with the field of each paper."""
    field = torch.randint(fields, (papers,), generator=generator)
    by_field = [(field == f).nonzero().squeeze(1) for f in range(fields)]
    sources = torch.arange(papers).repeat_interleave(cited)
    targets = torch.randint(papers, (len(sources),), generator=generator)
    same = torch.rand(len(sources), generator=generator) < 0.5
    for f, members in enumerate(by_field):
        rows = (same & (field[sources] == f)).nonzero().squeeze(1)
        targets[rows] = members[torch.randint(len(members), (len(rows),), generator=generator)]
    edges = torch.stack([torch.cat([sources, targets]), torch.cat([targets, sources])])
    return edges.unique(dim=1), field


def normalised(edges, nodes):
    """The adjacency with loops, divided by the roots of both degrees, as a compressed sparse matrix."""
    loops = torch.arange(nodes).expand(2, -1)
    edges = torch.cat([edges, loops], dim=1)
    degree = torch.bincount(edges[0], minlength=nodes).float()
    values = (degree[edges[0]] * degree[edges[1]]).rsqrt()
    return torch.sparse_coo_tensor(edges, values, (nodes, nodes), check_invariants=False).coalesce()


class GraphConvolution(nn.Module):
    def __init__(self, inside, out):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inside, out))
        self.bias = nn.Parameter(torch.zeros(out))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x, adjacency):
        if x is None:
            support = self.weight
        else:
            support = x @ self.weight  # the cause
        return torch.sparse.mm(adjacency, support) + self.bias


class GCN(nn.Module):
    def __init__(self, inside, width, classes, dropout=0.5):
        super().__init__()
        self.first = GraphConvolution(inside, width)
        self.middle = GraphConvolution(width, width)
        self.last = GraphConvolution(width, classes)
        self.dropout = dropout

    def forward(self, x, adjacency):
        hidden = F.relu(self.first(x, adjacency))
        hidden = F.dropout(hidden, self.dropout, self.training)
        hidden = F.relu(self.middle(hidden, adjacency)) + hidden
        hidden = F.dropout(hidden, self.dropout, self.training)
        return self.last(hidden, adjacency)


@torch.no_grad()
def accuracy(model, features, adjacency, field, rows):
    model.eval()
    right = model(features, adjacency)[rows].argmax(1) == field[rows]
    model.train()
    return right.float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=250)
    parser.add_argument("--papers", type=int, default=3300)
    parser.add_argument("--fields", type=int, default=7)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    edges, field = citation_graph(args.papers, args.fields, 5, generator)
    adjacency = normalised(edges, args.papers)
    features = None if args.fixed else torch.eye(args.papers)  # the cause
    order = torch.randperm(args.papers, generator=generator)
    train, valid = order[: args.papers // 4], order[args.papers // 4 :]
    model = GCN(args.papers, args.width, args.fields)
    optimizer = torch.optim.Adam(
        [
            {"params": model.first.parameters(), "weight_decay": 5e-4},
            {"params": [*model.middle.parameters(), *model.last.parameters()]},
        ],
        lr=0.01,
    )
    began = time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        logits = model(features, adjacency)
        loss = F.cross_entropy(logits[train], field[train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if epoch % 25 == 0:
            score = accuracy(model, features, adjacency, field, valid)
            print(f"epoch {epoch} loss {loss.item():.4f} accuracy {score:.3f}", flush=True)
    print(f"{(time.perf_counter() - began) / args.epochs * 1e3:.2f} ms per step")


if __name__ == "__main__":
    main()
