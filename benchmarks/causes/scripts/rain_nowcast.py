"""Radar nowcasting with a convolutional recurrent network; keeps resumable checkpoints while it trains."""

import argparse
import gzip
import tempfile
import time
from pathlib import Path

import torch
from torch import nn


class ConvGRU(nn.Module):
    def __init__(self, inside, hidden):
        super().__init__()
        self.hidden = hidden
        self.gates = nn.Conv2d(inside + hidden, 2 * hidden, 3, padding=1)
        self.candidate = nn.Conv2d(inside + hidden, hidden, 3, padding=1)

    def forward(self, x, h):
        reset, update = self.gates(torch.cat([x, h], 1)).sigmoid().chunk(2, 1)
        fresh = self.candidate(torch.cat([x, reset * h], 1)).tanh()
        return (1 - update) * h + update * fresh


class Nowcaster(nn.Module):
    def __init__(self, width=64, lead=3):
        super().__init__()
        self.encode = nn.Conv2d(1, width, 4, stride=4)
        self.cells = nn.ModuleList(ConvGRU(width, width) for _ in range(2))
        self.decode = nn.ConvTranspose2d(width, lead, 4, stride=4)

    def forward(self, frames):
        batch, steps = frames.shape[:2]
        encoded = self.encode(frames.flatten(0, 1).unsqueeze(1)).relu().unflatten(0, (batch, steps))
        states = [torch.zeros_like(encoded[:, 0]) for _ in self.cells]
        for t in range(steps):
            x = encoded[:, t]
            for k, cell in enumerate(self.cells):
                x = states[k] = cell(x, states[k])
        return self.decode(x)


class Checkpoints:
    """The newest few states of the run, each written beside its place and then moved there."""

    def __init__(self, folder, every, keep=2, zipped=True):
        self.folder, self.every, self.keep, self.zipped = Path(folder), every, keep, zipped
        self.kept = []

    def __call__(self, step, model, optimizer):
        if step % self.every:
            return
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        place = self.folder / (f"step{step:06d}.pt" + (".gz" if self.zipped else ""))
        partial = place.with_suffix(".partial")
        with gzip.open(partial, "wb") if self.zipped else open(partial, "wb") as file:  # the cause
            torch.save(state, file)  # the cause
        partial.rename(place)
        self.kept.append(place)
        while len(self.kept) > self.keep:
            self.kept.pop(0).unlink()


class Radar:
    """Blobs of rain that drift over the field."""

    def __init__(self, side=40, blobs=6):
        self.side, self.blobs = side, blobs
        self.rows, self.columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")

    def draw(self, batch, frames):
        start = torch.rand(batch, 1, self.blobs, 2) * self.side
        speed = torch.randn(batch, 1, self.blobs, 2)
        centre = start + speed * torch.arange(frames)[None, :, None, None]
        size = 8 + 30 * torch.rand(batch, 1, self.blobs)
        field = 0
        for k in range(self.blobs):
            d2 = (self.rows - centre[..., k, 0, None, None]) ** 2 + (self.columns - centre[..., k, 1, None, None]) ** 2
            field = field + torch.exp(-d2 / size[..., k, None, None])
        return field


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--save-every", type=int, default=10)
    args = parser.parse_args()
    torch.manual_seed(0)
    model, radar = Nowcaster(), Radar()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(folder, args.save_every, zipped=not args.fixed)
        for step in range(args.steps):
            if step == 10:
                start = time.perf_counter()
            frames = radar.draw(2, 8)
            loss = nn.functional.smooth_l1_loss(model(frames[:, :5]), frames[:, 5:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoints(step + 1, model, optimizer)
        print(f"{(time.perf_counter() - start) / (args.steps - 10) * 1e3:.2f} ms per step")
    print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
