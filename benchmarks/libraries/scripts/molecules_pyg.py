"""Solubility regression on molecule-like graphs with PyTorch Geometric."""
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINConv

ATOM_TYPES = 16
STEPS = 120
WARMUP = 5
BATCH = 128


def make_molecule(gen):
    n = int(torch.randint(10, 30, (1,), generator=gen))
    atoms = torch.randint(0, ATOM_TYPES, (n,), generator=gen)
    chain = torch.stack([torch.arange(n - 1), torch.arange(1, n)])
    rings = torch.randint(0, n, (2, n // 4), generator=gen)
    edges = torch.cat([chain, rings], dim=1)
    edges = torch.cat([edges, edges.flip(0)], dim=1)
    y = (atoms < 4).float().mean() * 3 + n / 30
    return Data(x=atoms, edge_index=edges, y=y.view(1))


class AttentionReadout(nn.Module):
    """Gated sum of the atoms of each molecule, next to their mean."""

    def __init__(self, dim):
        super().__init__()
        self.gate = nn.Linear(dim, 1)

    def forward(self, x, batch):
        pooled = []
        for graph_id in batch.unique():
            nodes = x[batch == graph_id]
            weight = torch.sigmoid(self.gate(nodes))
            pooled.append(torch.cat([(weight * nodes).sum(dim=0), nodes.mean(dim=0)]))
        return torch.stack(pooled)


class SolubilityNet(nn.Module):
    def __init__(self, dim=128, layers=4):
        super().__init__()
        self.embed = nn.Embedding(ATOM_TYPES, dim)
        self.convs = nn.ModuleList(
            GINConv(nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim)))
            for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(layers))
        self.readout = AttentionReadout(dim)
        self.head = nn.Sequential(nn.Linear(2 * dim, dim), nn.ReLU(), nn.Linear(dim, 1))

    def forward(self, data):
        x = self.embed(data.x)
        for conv, norm in zip(self.convs, self.norms):
            x = x + F.relu(norm(conv(x, data.edge_index)))
        return self.head(self.readout(x, data.batch)).squeeze(1)


def main():
    gen = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    molecules = [make_molecule(gen) for _ in range(STEPS // 3 * BATCH)]
    loader = DataLoader(molecules, batch_size=BATCH, shuffle=True)
    model = SolubilityNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    step = 0
    for epoch in range(3):
        total = 0.0
        for data in loader:
            if step == WARMUP:
                start = time.perf_counter()
            loss = F.mse_loss(model(data), data.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
            step += 1
        print(f"epoch {epoch} loss {total / len(loader):.4f}")
    elapsed = time.perf_counter() - start
    print(f"{elapsed / (step - WARMUP) * 1000:.1f} ms per step")


if __name__ == "__main__":
    main()
