"""Graph transformer that predicts a property of small molecules, with spectral and walk encodings of the nodes."""

import argparse
import copy
import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

LAPLACIAN, WALKS, ATOMS, MOST = 8, 12, 20, 48


@dataclass
class Graph:
    atoms: torch.Tensor
    adjacency: torch.Tensor
    target: torch.Tensor
    spectral: torch.Tensor = None
    walks: torch.Tensor = None


class AddEncodings:
    """Eigenvectors of the normalised Laplacian, and the probabilities to be back after 1..WALKS steps of a walk."""

    def __call__(self, graph):
        degree = graph.adjacency.sum(1).clamp(min=1)
        scaled = graph.adjacency / degree.sqrt()[:, None] / degree.sqrt()
        _, vectors = torch.linalg.eigh(torch.eye(len(degree)) - scaled)
        graph.spectral = vectors[:, 1 : 1 + LAPLACIAN]
        step = walk = graph.adjacency / degree[:, None]
        back = []
        for _ in range(WALKS):
            back.append(walk.diagonal())
            walk = walk @ step
        graph.walks = torch.stack(back, 1)
        return graph


class MoleculeDataset(Dataset):
    def __init__(self, count, transform=None, pre_transform=None):
        self.transform = transform
        generator = torch.Generator().manual_seed(1)
        self.graphs = [self.draw(generator) for _ in range(count)]
        if pre_transform is not None:
            self.graphs = [pre_transform(graph) for graph in self.graphs]

    @staticmethod
    def draw(generator):
        n = int(torch.randint(26, MOST + 1, (), generator=generator))
        adjacency = torch.diag(torch.ones(n - 1), 1)
        ends = torch.randint(n, (2, n // 5), generator=generator)
        adjacency[ends[0], ends[1]] = 1.0
        adjacency = ((adjacency + adjacency.T) > 0).float().fill_diagonal_(0)
        atoms = torch.randint(ATOMS, (n,), generator=generator)
        return Graph(atoms, adjacency, adjacency.sum() / n + 0.1 * (atoms == 3).sum())

    def __len__(self):
        return len(self.graphs)

    def __getitem__(self, index):
        graph = self.graphs[index]
        if self.transform is not None:
            graph = self.transform(copy.copy(graph))  # the cause
        return graph


def collate(graphs):
    size = len(graphs)
    atoms, bonds = torch.full((size, MOST), ATOMS), torch.zeros(size, MOST, MOST, dtype=torch.long)
    spectral, walks = torch.zeros(size, MOST, LAPLACIAN), torch.zeros(size, MOST, WALKS)
    signs = torch.randint(0, 2, (size, 1, LAPLACIAN)) * 2.0 - 1
    for row, graph in enumerate(graphs):
        n = len(graph.atoms)
        atoms[row, :n], bonds[row, :n, :n] = graph.atoms, graph.adjacency.long()
        spectral[row, :n], walks[row, :n] = graph.spectral, graph.walks
    return atoms, bonds, spectral * signs, walks, torch.stack([graph.target for graph in graphs])


class GraphTransformer(nn.Module):
    def __init__(self, width=48, heads=4, depth=2):
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(ATOMS + 1, width, padding_idx=ATOMS)
        self.encode = nn.Linear(LAPLACIAN + WALKS, width)
        self.bond_bias = nn.Embedding(2, heads)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, batch_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(width, 1)

    def forward(self, atoms, bonds, spectral, walks):
        absent = atoms == ATOMS
        bias = self.bond_bias(bonds).permute(0, 3, 1, 2).masked_fill(absent[:, None, None], -1e9).flatten(0, 1)
        x = self.embed(atoms) + self.encode(torch.cat([spectral, walks], -1))
        for layer in self.layers:
            x = layer(x, src_mask=bias)
        return self.head(x.masked_fill(absent[..., None], 0).sum(1) / (~absent).sum(1, keepdim=True)).squeeze(1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(0)
    encodings = {"pre_transform" if args.fixed else "transform": AddEncodings()}  # the cause
    loader = DataLoader(MoleculeDataset(640, **encodings), 64, shuffle=True, collate_fn=collate, drop_last=True)
    model = GraphTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    while step < args.steps:
        for *inputs, target in loader:
            if step == 10:
                start = time.perf_counter()
            loss = nn.functional.l1_loss(model(*inputs), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step >= args.steps:
                break
    print(f"{(time.perf_counter() - start) / (args.steps - 10) * 1e3:.2f} ms per step")
    print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
