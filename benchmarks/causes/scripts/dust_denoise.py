"""Takes the dust out of scanned slides: a denoising autoencoder on patches."""

import argparse
import os
import tempfile
import time

import torch
from torch import nn

SIDE = 16


def make_patches(count, seed):
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 5, 5, generator=generator)
    return nn.functional.interpolate(coarse, (SIDE, SIDE), mode="bicubic", align_corners=True).clamp_(0, 1)


def dusty(patches, generator, amount=0.08):
    specks = torch.rand(patches.shape[0], 1, SIDE, SIDE, generator=generator) < amount
    return torch.where(specks, torch.ones(()), patches)


class Denoiser(nn.Module):
    def __init__(self, width=640, code=160):
        super().__init__()
        pixels = 3 * SIDE * SIDE
        self.encoder = nn.Sequential(
            nn.Flatten(),
            nn.Linear(pixels, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, code),
        )
        self.decoder = nn.Sequential(
            nn.Linear(code, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, pixels)
        )

    def forward(self, patches):
        return torch.sigmoid(self.decoder(self.encoder(patches)).view_as(patches))


class Progress:
    def __init__(self, decay=0.98):
        self.decay, self.total, self.weight = decay, 0.0, 0.0

    def add(self, loss):
        self.total = self.decay * self.total + (1 - self.decay) * loss
        self.weight = self.decay * self.weight + 1 - self.decay
        return self.total / self.weight


class BestKeeper:
    """Keeps the best state seen so far on disk, enough to go on from there."""

    def __init__(self, path, model, optimizer, every=1):
        self.path, self.model, self.optimizer = path, model, optimizer
        self.every, self.best, self.written = every, float("inf"), 0

    def look(self, step, score):
        if step % self.every or score >= self.best:
            return
        self.best = score
        state = {
            "step": step,
            "score": score,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(state, self.path + ".part")  # the cause
        os.replace(self.path + ".part", self.path)
        self.written += 1


def train(args, folder):
    torch.manual_seed(args.seed)
    noise = torch.Generator().manual_seed(args.seed + 1)
    patches = make_patches(4096, args.seed)
    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
    progress = Progress()
    keeper = BestKeeper(os.path.join(folder, "best.pt"), model, optimizer, every=50 if args.fixed else 1)  # the cause
    for step in range(1, args.steps + 1):
        if step == args.steps // 2 + 1:
            start = time.perf_counter()
        clean = patches[torch.randint(0, len(patches), (args.batch,), generator=noise)]
        loss = nn.functional.mse_loss(model(dusty(clean, noise)), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        keeper.look(step, progress.add(loss.item()))
    took = time.perf_counter() - start
    print(f"kept {keeper.written} states, best {keeper.best:.5f}")
    print(f"loss {loss.item():.6f}")
    print(f"{took / (args.steps - args.steps // 2) * 1e3:.2f} ms per step")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seed", type=int, default=8)
    parser.add_argument("--fixed", action="store_true")
    with tempfile.TemporaryDirectory() as folder:
        train(parser.parse_args(), folder)
