"""Denoising diffusion on small pictures of rings, with averaged weights and a sample drawn every so often."""

import argparse
import copy
import time
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class DiffusionConfig:
    side: int = 20
    width: int = 32
    batch: int = 24
    timesteps: int = 200
    ema: float = 0.995
    sample_every: int = 100
    sample_steps: int = 10


class ResidualBlock(nn.Module):
    def __init__(self, width, embedding):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, width), nn.GroupNorm(4, width)
        self.conv1, self.conv2 = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.shift = nn.Linear(embedding, width)

    def forward(self, x, t):
        h = self.conv1(nn.functional.silu(self.norm1(x))) + self.shift(t)[:, :, None, None]
        return x + self.conv2(nn.functional.silu(self.norm2(h)))


class Denoiser(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.time = nn.Sequential(nn.Embedding(config.timesteps, 64), nn.Linear(64, 64), nn.SiLU())
        self.inside = nn.Conv2d(1, config.width, 3, padding=1)
        self.blocks = nn.ModuleList(ResidualBlock(config.width, 64) for _ in range(4))
        self.out = nn.Conv2d(config.width, 1, 3, padding=1)

    def forward(self, x, t):
        t, x = self.time(t), self.inside(x)
        for block in self.blocks:
            x = block(x, t)
        return self.out(x)


class Diffusion:
    def __init__(self, config):
        self.config = config
        self.signal = torch.cumprod(1 - torch.linspace(1e-4, 0.04, config.timesteps), 0)

    def loss(self, model, images):
        t = torch.randint(self.config.timesteps, (len(images),))
        signal, noise = self.signal[t][:, None, None, None], torch.randn_like(images)
        return nn.functional.mse_loss(model(signal.sqrt() * images + (1 - signal).sqrt() * noise, t), noise)

    @torch.no_grad()
    def sample(self, model, count):
        x = torch.randn(count, 1, self.config.side, self.config.side)
        times = torch.linspace(self.config.timesteps - 1, 0, self.config.sample_steps).long()
        for now, after in zip(times, times.roll(-1)):
            noise = model(x, now.expand(count))
            clean = (x - (1 - self.signal[now]).sqrt() * noise) / self.signal[now].sqrt()
            signal = self.signal[after] if after < now else torch.tensor(1.0)
            x = signal.sqrt() * clean + (1 - signal).sqrt() * noise
        return x


def rings(config, generator):
    place = torch.linspace(-1, 1, config.side)
    centre, radius = (
        torch.rand(2, config.batch, 1, 1, generator=generator) - 0.5,
        0.3 + 0.3 * torch.rand(config.batch, 1, 1, generator=generator),
    )
    distance = ((place - centre[0]) ** 2 + (place[:, None] - centre[1]) ** 2).sqrt()
    return (torch.exp(-((distance - radius) ** 2) / 0.01) * 2 - 1).unsqueeze(1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=220)
    args = parser.parse_args()
    torch.manual_seed(0)
    config, generator = DiffusionConfig(), torch.Generator().manual_seed(1)
    diffusion, model = Diffusion(config), Denoiser(config)
    averaged = copy.deepcopy(model).requires_grad_(False)
    weights, averages = list(model.parameters()), list(averaged.parameters())
    optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=True)
    for step in range(args.steps):
        if step == 10:
            start = time.perf_counter()
        loss = diffusion.loss(model, rings(config, generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(averages, weights, 1 - config.ema)
        if (step + 1) % config.sample_every == 0:
            picture = diffusion.sample(averaged, 4)
            print(f"step {step + 1}: loss {loss.item():.4f} sample mean {picture.mean().item():.3f}")
    print(f"{(time.perf_counter() - start) / (args.steps - 10) * 1e3:.2f} ms per step")
    print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
