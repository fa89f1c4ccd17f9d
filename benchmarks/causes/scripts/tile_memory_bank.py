"""Instance discrimination on satellite tiles with a memory bank of all embeddings."""

import argparse
import pathlib
import sys
import tempfile
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

FIXED = "--fixed" in sys.argv


class Tiles:
    """Tiles share a few land-cover textures; two crops of one tile form a positive pair."""

    def __init__(self, count, size, seed):
        self.g = torch.Generator().manual_seed(seed)
        cover = torch.randint(0, 24, (count,), generator=self.g)
        texture = torch.randint(40, 200, (24, 3, size, size), generator=self.g)
        jitter = torch.randint(-40, 40, (count, 3, size, size), generator=self.g, dtype=torch.int16)
        self.pixels = (texture[cover].to(torch.int16) + jitter).clamp_(0, 255).to(torch.uint8)
        self.crop = size - 4

    def __len__(self):
        return self.pixels.size(0)

    def batch(self, n):
        idx = torch.randint(0, len(self), (n,), generator=self.g)
        dy, dx = torch.randint(0, 5, (2,), generator=self.g).tolist()
        x = self.pixels[idx, :, dy : dy + self.crop, dx : dx + self.crop].float() / 127.5 - 1
        if torch.rand((), generator=self.g) < 0.5:
            x = x.flip(-1)
        return idx, x


class TileEncoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 128, 3, padding=1),
            nn.ReLU(),
        )
        self.project = nn.Linear(128, dim)

    def forward(self, x):
        return F.normalize(self.project(self.features(x).mean((2, 3))), dim=1)


class DriftRecorder:
    """Keeps the last few versions of some probe embeddings for the drift plot."""

    def __init__(self, folder, keep):
        self.folder, self.keep = pathlib.Path(folder), keep
        self.written = []

    def write(self, step, probes, loss):
        path = self.folder / f"probe_{step:06d}.pt"
        torch.save({"step": step, "loss": loss, "probes": probes}, path)  # the cause
        self.written.append(path)
        while len(self.written) > self.keep:
            self.written.pop(0).unlink()


def nce_loss(emb, idx, bank, negatives, gen, temp=0.2):
    neg = torch.randint(0, bank.size(0), (negatives,), generator=gen)
    pos = (emb * bank[idx]).sum(1, keepdim=True)
    logits = torch.cat([pos, emb @ bank[neg].t()], dim=1) / temp
    return F.cross_entropy(logits, torch.zeros(len(idx), dtype=torch.long))


@torch.no_grad()
def refresh(bank, idx, emb, momentum=0.5):
    bank[idx] = F.normalize(momentum * bank[idx] + (1 - momentum) * emb, dim=1)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--fixed", action="store_true")
    p.add_argument("--tiles", type=int, default=80_000)
    p.add_argument("--size", type=int, default=24)
    p.add_argument("--dim", type=int, default=256)
    p.add_argument("--batch-size", type=int, default=64)
    p.add_argument("--negatives", type=int, default=2048)
    p.add_argument("--probe", type=int, default=64)
    p.add_argument("--record-every", type=int, default=4)
    p.add_argument("--steps", type=int, default=700)
    args = p.parse_args()

    torch.manual_seed(0)
    tiles = Tiles(args.tiles, args.size, seed=2)
    gen = torch.Generator().manual_seed(8)
    bank = F.normalize(torch.randn(args.tiles, args.dim, generator=gen), dim=1)
    model = TileEncoder(args.dim)
    opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)

    warmup, t0, mean = 5, None, None
    with tempfile.TemporaryDirectory() as folder:
        recorder = DriftRecorder(folder, keep=3)
        for step in range(args.steps):
            if step == warmup:
                t0 = time.perf_counter()
            idx, x = tiles.batch(args.batch_size)
            emb = model(x)
            loss = nce_loss(emb, idx, bank, args.negatives, gen)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            refresh(bank, idx, emb.detach())
            value = loss.item()
            mean = value if mean is None else 0.95 * mean + 0.05 * value
            if step % args.record_every == 0:
                probes = bank[: args.probe].clone() if FIXED else bank[: args.probe]
                recorder.write(step, probes, value)  # the cause
            if (step + 1) % 50 == 0:
                print(f"step {step + 1} nce {mean:.4f}", flush=True)
        wall = time.perf_counter() - t0
    print(f"final loss {mean:.6f}")
    print(f"{1000 * wall / (args.steps - warmup):.2f} ms per step")


if __name__ == "__main__":
    main()
