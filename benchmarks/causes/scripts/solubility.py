"""Predicts how well molecules dissolve, by passing messages along their bonds."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

ATOMS, BONDS = 10, 4


def molecules(count, generator):
    """Random trees of atoms with a few rings: dictionaries of tensors, bonds in both directions."""
    made = []
    worth = torch.linspace(-1, 1, ATOMS)
    for size in torch.randint(12, 36, (count,), generator=generator).tolist():
        atoms = (torch.rand(size, generator=generator) ** 2 * ATOMS).long()
        child = torch.arange(1, size)
        parent = (child - 1 - (torch.rand(size - 1, generator=generator) * 3).long()).clamp(min=0)
        ring = torch.randint(size, (2, 3), generator=generator)
        one, other = torch.cat([child, ring[0]]), torch.cat([parent, ring[1]])
        kind = torch.randint(BONDS, one.shape, generator=generator)
        solubility = worth[atoms].mean() - 0.3 * (worth[atoms[one]] * worth[atoms[other]]).mean()
        made.append(
            {
                "atoms": atoms,
                "edges": torch.stack([torch.cat([one, other]), torch.cat([other, one])]),
                "kinds": kind.repeat(2),
                "y": solubility,
            }
        )
    return made


def collate(batch):
    """One graph of many molecules, with the molecule of each atom."""
    sizes = torch.tensor([len(m["atoms"]) for m in batch])
    starts = (sizes.cumsum(0) - sizes).tolist()
    edges = torch.cat([m["edges"] + start for m, start in zip(batch, starts)], dim=1)
    owner = torch.arange(len(batch)).repeat_interleave(sizes)
    atoms, kinds = torch.cat([m["atoms"] for m in batch]), torch.cat([m["kinds"] for m in batch])
    return atoms, edges, kinds, owner, torch.stack([m["y"] for m in batch])


class Passing(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.bond = nn.Embedding(BONDS, width)
        self.message = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.update, self.norm = nn.GRUCell(width, width), nn.LayerNorm(width)

    def forward(self, h, edges, kinds):
        source, target = edges
        messages = self.message(torch.cat([h[source], self.bond(kinds)], dim=1))
        gathered = torch.zeros_like(h).index_add_(0, target, messages)
        return self.norm(self.update(gathered, h))


class Solubility(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.atom = nn.Embedding(ATOMS, width)
        self.layers = nn.ModuleList(Passing(width) for _ in range(depth))
        self.read = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, atoms, edges, kinds, owner, count):
        h = self.atom(atoms)
        for layer in self.layers:
            h = h + layer(h, edges, kinds)
        pooled = torch.zeros(count, h.shape[1]).index_add_(0, owner, h)
        pooled = pooled / torch.bincount(owner, minlength=count).unsqueeze(1)
        return self.read(pooled).squeeze(1)


@torch.no_grad()
def mean_absolute_error(model, loader):
    model.eval()
    total, count = 0.0, 0
    for atoms, edges, kinds, owner, y in loader:
        total += (model(atoms, edges, kinds, owner, len(y)) - y).abs().sum().item()
        count += len(y)
    model.train()
    return total / count


def train(args):
    generator = torch.Generator().manual_seed(0)
    made = molecules(args.molecules, generator)
    held = len(made) // 10
    loader = DataLoader(made[held:], args.batch, shuffle=True, collate_fn=collate, drop_last=True)
    valid = DataLoader(made[:held], 128, collate_fn=collate)
    model = Solubility(args.width, args.depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    step, running, began = 0, torch.zeros(()), time.perf_counter()
    for epoch in range(args.epochs):
        for atoms, edges, kinds, owner, y in loader:
            loss = F.smooth_l1_loss(model(atoms, edges, kinds, owner, len(y)), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            step += 1
            running += loss.detach()
            if step % 25 == 0:
                print(f"epoch {epoch} step {step} loss {running.item() / 25:.4f}", flush=True)
                running.zero_()
        print(f"epoch {epoch} valid error {mean_absolute_error(model, valid):.4f}", flush=True)
    print(f"{(time.perf_counter() - began) / step * 1e3:.2f} ms per step")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--molecules", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--depth", type=int, default=3)
    torch.manual_seed(0)
    train(parser.parse_args())
