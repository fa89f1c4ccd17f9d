"""Learns energies of periodic structures by messages between neighbouring atoms. --fixed: the remedy."""

import numpy as np
import torch
from clock import FIXED, Clock
from torch import nn
from torch.utils.data import DataLoader, Dataset

STRUCTURES, ATOMS, CUTOFF, BATCH, STEPS = 96, 56, 2.0, 10, 120
SHIFTS = np.stack(np.meshgrid([-1, 0, 1], [-1, 0, 1], [-1, 0, 1], indexing="ij"), -1).reshape(-1, 3)


def neighbour_list(positions, cell):
    """The pairs (i, j) within the cutoff, over the cell and its 26 images, with their distances."""
    moved = positions[None, :, :] + (SHIFTS @ cell)[:, None, :]
    delta = positions[:, None, None, :] - moved[None]
    distance = np.sqrt((delta**2).sum(-1))
    near = (distance < CUTOFF) & (distance > 1e-6)
    i, _, j = np.nonzero(near)
    return np.stack([i, j]), distance[near].astype(np.float32)


class Structures(Dataset):
    def __init__(self, seed=0):
        rng = np.random.default_rng(seed)
        self.cells = [np.diag(rng.uniform(5, 6, 3)) for _ in range(STRUCTURES)]
        self.positions = [rng.random((ATOMS, 3)) @ cell for cell in self.cells]
        self.species = rng.integers(1, 9, (STRUCTURES, ATOMS))
        self.energies = rng.normal(size=STRUCTURES).astype(np.float32)
        self.graphs = [self._graph(index) for index in range(STRUCTURES)] if FIXED else None

    def _graph(self, index):
        pairs, distance = neighbour_list(self.positions[index], self.cells[index])
        return torch.from_numpy(pairs), torch.from_numpy(distance)

    def __len__(self):
        return STRUCTURES

    def __getitem__(self, index):
        pairs, distance = self.graphs[index] if self.graphs else self._graph(index)  # the cause
        return torch.from_numpy(self.species[index]), pairs, distance, self.energies[index]


def collate(items):
    species, pairs, distances, energies = zip(*items)
    edges = torch.cat([pair + ATOMS * number for number, pair in enumerate(pairs)], 1)
    return torch.cat(species), edges, torch.cat(distances), torch.tensor(energies)


class Interaction(nn.Module):
    def __init__(self, width, basis):
        super().__init__()
        self.filters = nn.Sequential(nn.Linear(basis, width), nn.SiLU(), nn.Linear(width, width))
        self.before, self.after = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, h, edges, basis):
        messages = self.before(h).index_select(0, edges[1]) * self.filters(basis)
        return h + self.after(nn.functional.silu(torch.zeros_like(h).index_add(0, edges[0], messages)))


class EnergyModel(nn.Module):
    def __init__(self, width=24, basis=12, layers=2):
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.register_buffer("centres", torch.linspace(0, CUTOFF, basis))
        self.layers = nn.ModuleList(Interaction(width, basis) for _ in range(layers))
        self.head = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, species, edges, distance):
        basis = torch.exp(-8 * (distance[:, None] - self.centres) ** 2)
        h = self.embed(species)
        for layer in self.layers:
            h = layer(h, edges, basis)
        return self.head(h).view(-1, ATOMS).mean(1)


def main():
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(
        Structures(), BATCH, shuffle=True, collate_fn=collate, num_workers=1, persistent_workers=True, generator=order
    )
    model = EnergyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    clock, going = Clock(STEPS), True
    while going:
        for species, edges, distance, energy in loader:
            loss = nn.functional.mse_loss(model(species, edges, distance), energy)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            going = clock.step()
            if not going:
                break
    print(f"loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
