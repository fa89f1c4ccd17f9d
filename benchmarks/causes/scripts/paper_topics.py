"""Classifies the papers of a citation graph by topic with graph convolutions."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn


def citation_graph(papers, links, topics, words, seed=0):
    """Papers cite mostly papers of their own topic; the words of a paper hint at it."""
    make = torch.Generator().manual_seed(seed)
    topic = torch.randint(topics, (papers,), generator=make).sort().values
    source = torch.randint(papers, (links,), generator=make)
    near = source + torch.randint(-papers // topics // 2, papers // topics // 2, (links,), generator=make)
    anywhere = torch.randint(papers, (links,), generator=make)
    target = torch.where(torch.rand(links, generator=make) < 0.7, near % papers, anywhere)
    edges = torch.stack([torch.cat([source, target]), torch.cat([target, source])])
    hints = torch.randn(topics, words, generator=make)
    return edges, hints[topic] + 3 * torch.randn(papers, words, generator=make), topic


def normalized_adjacency(edges, nodes):
    """The symmetrically normalised adjacency matrix with self loops, sparse."""
    loops = torch.arange(nodes).expand(2, -1)
    indices = torch.cat([edges, loops], 1)
    adjacency = torch.sparse_coo_tensor(indices, torch.ones(indices.shape[1]), (nodes, nodes)).coalesce()
    rows, columns = adjacency.indices()
    degree = torch.zeros(nodes).index_add_(0, rows, adjacency.values())
    scale = degree.rsqrt()
    weights = adjacency.values() * scale[rows] * scale[columns]
    return torch.sparse_coo_tensor(adjacency.indices(), weights, (nodes, nodes)).coalesce().to_sparse_csr()


class GraphConv(nn.Module):
    def __init__(self, inside, out):
        super().__init__()
        self.linear = nn.Linear(inside, out)

    def forward(self, x, edges, adjacency=None):
        if adjacency is None:
            adjacency = normalized_adjacency(edges, len(x))  # the cause
        return adjacency @ self.linear(x)


class GCN(nn.Module):
    def __init__(self, words, hidden, topics, layers=2):
        super().__init__()
        widths = [words] + [hidden] * (layers - 1) + [topics]
        self.convs = nn.ModuleList([GraphConv(a, b) for a, b in zip(widths, widths[1:])])

    def forward(self, x, edges, adjacency=None):
        for conv in self.convs[:-1]:
            x = F.dropout(F.relu(conv(x, edges, adjacency)), 0.5, self.training)
        return self.convs[-1](x, edges, adjacency)


@torch.no_grad()
def accuracy(model, x, edges, adjacency, topic, mask):
    model.eval()
    predicted = model(x, edges, adjacency).argmax(1)
    model.train()
    return (predicted == topic)[mask].float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--papers", type=int, default=8000)
    parser.add_argument("--links", type=int, default=50000)
    parser.add_argument("--topics", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    edges, x, topic = citation_graph(args.papers, args.links, args.topics, words=64)
    shuffled = torch.randperm(args.papers)
    training, validation = shuffled[: args.papers // 5], shuffled[-args.papers // 5 :]
    model = GCN(x.shape[1], 32, args.topics)
    adjacency = normalized_adjacency(edges, args.papers) if args.fixed else None
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    seconds = 0
    for epoch in range(1, args.epochs + 1):
        began = time.perf_counter()
        loss = F.cross_entropy(model(x, edges, adjacency)[training], topic[training])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds += time.perf_counter() - began
        if epoch % 40 == 0:
            right = accuracy(model, x, edges, adjacency, topic, validation)
            print(f"epoch {epoch} loss {loss.item():.5f} validation {right:.3f}", flush=True)
    print(f"{seconds / args.epochs * 1e3:.2f} ms per step")


if __name__ == "__main__":
    main()
