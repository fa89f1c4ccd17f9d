"""A small GAN of sprites, judged now and then by the Frechet distance to real ones."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn

SIZE, LATENT = 32, 32


def make_sprites(count):
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    place = torch.randint(10, SIZE - 10, (2, count, 1, 1))
    radius = torch.randint(4, 9, (count, 1, 1))
    dx, dy = (x - place[0]).abs(), (y - place[1]).abs()
    shape = torch.where(torch.rand(count, 1, 1) < 0.5, dx**2 + dy**2 < radius**2, torch.maximum(dx, dy) < radius)
    color = torch.rand(count, 3, 1, 1) * 0.8 + 0.2
    return (shape.unsqueeze(1) * color) * 2 - 1


def up(inside, out, stride=2, padding=1):
    return nn.ConvTranspose2d(inside, out, 4, stride, padding, bias=False), nn.BatchNorm2d(out), nn.ReLU()


def generator(width=24):
    return nn.Sequential(
        *up(LATENT, 4 * width, 1, 0),
        *up(4 * width, 2 * width),
        *up(2 * width, width),
        nn.ConvTranspose2d(width, 3, 4, 2, 1),
        nn.Tanh(),
    )


def down(inside, out):
    return nn.Conv2d(inside, out, 4, 2, 1), nn.LeakyReLU(0.2)


def discriminator(width=24):
    return nn.Sequential(
        *down(3, width), *down(width, 2 * width), *down(2 * width, 4 * width), nn.Flatten(), nn.Linear(64 * width, 1)
    )


class Features(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, width, 3, 1, 1), nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.last = nn.Conv2d(2 * width, 2 * width, 3, 2, 1)
        self.requires_grad_(False)

    def forward(self, x):
        return self.last(F.relu(self.second(F.relu(self.first(x))))).mean((2, 3))


class FrechetDistance:
    def __init__(self, real, fakes=512, keep=False):
        self.network, self.real, self.fakes = Features(), real, fakes
        self.noise = torch.randn(fakes, LATENT, 1, 1)
        self.kept = self.statistics(real) if keep else None

    def statistics(self, images):
        features = torch.cat([self.network(part) for part in images.split(128)]).double()
        return features.mean(0), torch.cov(features.T)

    @torch.no_grad()
    def __call__(self, model):
        model.eval()
        fake = torch.cat([model(part) for part in self.noise.split(128)])
        model.train()
        mean_real, cov_real = self.kept or self.statistics(self.real)  # the cause
        mean_fake, cov_fake = self.statistics(fake)
        cross = torch.linalg.eigvals(cov_real @ cov_fake).real.clamp(min=0).sqrt().sum()
        return ((mean_real - mean_fake).square().sum() + cov_real.trace() + cov_fake.trace() - 2 * cross).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    sprites = make_sprites(4000)
    make, judge = generator(), discriminator()
    distance = FrechetDistance(sprites, keep=args.fixed)
    adam_g = torch.optim.Adam(make.parameters(), lr=2e-4, betas=(0.5, 0.999))
    adam_d = torch.optim.Adam(judge.parameters(), lr=2e-4, betas=(0.5, 0.999))
    began = time.perf_counter()
    for step in range(1, args.steps + 1):
        real = sprites[torch.randint(len(sprites), (48,))]
        fake = make(torch.randn(48, LATENT, 1, 1))
        loss_d = F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()
        adam_d.zero_grad()
        loss_d.backward()
        adam_d.step()
        judge.requires_grad_(False)
        loss_g = F.softplus(-judge(fake)).mean()
        judge.requires_grad_(True)
        adam_g.zero_grad()
        loss_g.backward()
        adam_g.step()
        if step % 20 == 0:
            print(f"step {step} loss {loss_d.item():.4f} {loss_g.item():.4f} distance {distance(make):.5f}", flush=True)
    print(f"{(time.perf_counter() - began) / args.steps * 1e3:.2f} ms per step")


if __name__ == "__main__":
    main()
