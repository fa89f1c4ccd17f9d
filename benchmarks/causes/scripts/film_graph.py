"""Genres of films from the graph of shared actors, a graph convolution network on all nodes."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn

FILMS, GENRES, WORDS = 2400, 7, 128


def make_graph(seed, links=6):
    generator = torch.Generator().manual_seed(seed)
    genre = torch.randint(0, GENRES, (FILMS,), generator=generator)
    source = torch.arange(FILMS).repeat_interleave(links)
    target = torch.randint(0, FILMS, (FILMS * links,), generator=generator)
    agree = genre[source] == genre[target]
    keep = agree | (torch.rand(FILMS * links, generator=generator) < 0.25)
    edges = torch.stack([source[keep], target[keep]])
    edges = torch.cat([edges, edges.flip(0), torch.arange(FILMS).repeat(2, 1)], 1).unique(dim=1)
    words = torch.randn(GENRES, WORDS, generator=generator)[genre] * 0.3
    return edges, words + torch.randn(FILMS, WORDS, generator=generator), genre


def normalised_weights(edges):
    degree = torch.bincount(edges[0], minlength=FILMS).float()
    return (degree[edges[0]] * degree[edges[1]]).rsqrt()


def adjacency(edges, compact):
    weights = normalised_weights(edges)
    if compact:
        return torch.sparse_coo_tensor(edges, weights, (FILMS, FILMS)).coalesce().to_sparse_csr()
    matrix = torch.zeros(FILMS, FILMS)  # the cause
    matrix[edges[0], edges[1]] = weights  # the cause
    return matrix


class GraphConv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x, links):
        return links @ self.linear(x) + self.bias  # the cause


class FilmGCN(nn.Module):
    def __init__(self, width=96, depth=3, dropout=0.4):
        super().__init__()
        sizes = [WORDS] + [width] * (depth - 1) + [GENRES]
        self.layers = nn.ModuleList(GraphConv(a, b) for a, b in zip(sizes, sizes[1:]))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth - 1))
        self.dropout = dropout

    def forward(self, x, links):
        for layer, norm in zip(self.layers, self.norms):
            x = F.dropout(F.relu(norm(layer(x, links))), self.dropout, self.training)
        return self.layers[-1](x, links)


@torch.no_grad()
def accuracy(model, words, links, genre, nodes):
    model.eval()
    hits = (model(words, links)[nodes].argmax(1) == genre[nodes]).float().mean().item()
    model.train()
    return hits


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seed", type=int, default=12)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    edges, words, genre = make_graph(args.seed)
    links = adjacency(edges, compact=args.fixed)
    order = torch.randperm(FILMS)
    train, held_out = order[:1600], order[1600:]
    model = FilmGCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
    stamps = []
    for step in range(args.steps):
        stamps.append(time.perf_counter())
        loss = F.cross_entropy(model(words, links)[train], genre[train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}: held out {accuracy(model, words, links, genre, held_out):.3f}")
    stamps.append(time.perf_counter())
    half = args.steps // 2
    print(f"loss {loss.item():.6f}")
    print(f"{(stamps[-1] - stamps[half]) / (args.steps - half) * 1e3:.2f} ms per step")


if __name__ == "__main__":
    main()
