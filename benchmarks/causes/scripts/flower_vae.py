"""Draws flowers with a variational autoencoder, and follows how far its samples are from real ones in features."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn


def flowers(count, size, generator):
    """Coloured flowers with different numbers of petals, at different places."""
    grid = torch.linspace(-1, 1, size)
    y, x = torch.meshgrid(grid, grid, indexing="ij")
    shift = 0.3 * torch.randn(count, 2, 1, 1, generator=generator)
    dx, dy = x - shift[:, 0], y - shift[:, 1]
    petals = torch.randint(3, 8, (count, 1, 1), generator=generator)
    turn = 6.28 * torch.rand(count, 1, 1, generator=generator)
    radius, angle = (dx**2 + dy**2).sqrt(), torch.atan2(dy, dx)
    shape = torch.sigmoid(20 * (0.35 + 0.2 * torch.cos(petals * angle + turn) - radius))
    colour = torch.rand(count, 3, 1, 1, generator=generator)
    return shape.unsqueeze(1) * colour + (1 - shape.unsqueeze(1)) * 0.1


class VAE(nn.Module):
    def __init__(self, size, width=16, latent=24):
        super().__init__()
        self.side, self.latent, self.inside = size // 8, latent, 4 * width
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1),
            nn.SiLU(),
            nn.Conv2d(width, 2 * width, 4, 2, 1),
            nn.SiLU(),
            nn.Conv2d(2 * width, 4 * width, 4, 2, 1),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(4 * width * self.side**2, 2 * latent),
        )
        self.expand = nn.Linear(latent, 4 * width * self.side**2)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1),
            nn.SiLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
            nn.SiLU(),
            nn.ConvTranspose2d(width, 3, 4, 2, 1),
            nn.Sigmoid(),
        )

    def decode(self, z):
        return self.decoder(self.expand(z).view(-1, self.inside, self.side, self.side))

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
        return self.decode(z), divergence


class FrechetDistance:
    """The distance of Gaussians fitted to features of two sets of images; the features come from a frozen network."""

    def __init__(self, width=32, batch=64):
        generator_state = torch.get_rng_state()
        self.batch = batch
        self.features = (
            nn.Sequential(
                nn.Conv2d(3, width, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, stride=2, padding=1),
                nn.ReLU(),
                nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
            )
            .requires_grad_(False)
            .eval()
        )
        torch.set_rng_state(generator_state)

    @torch.no_grad()
    def statistics(self, images):
        features = torch.cat([self.features(part) for part in images.split(self.batch)]).double()
        return features.mean(0), features.T.cov()

    def __call__(self, one, other):
        (mean, cov), (mean2, cov2) = one, other
        values, vectors = torch.linalg.eigh(cov)
        root = vectors * values.clamp(min=0).sqrt() @ vectors.T
        overlap = torch.linalg.eigvalsh(root @ cov2 @ root).clamp(min=0).sqrt().sum()
        return ((mean - mean2).square().sum() + cov.trace() + cov2.trace() - 2 * overlap).item()


@torch.no_grad()
def evaluate(model, distance, real, latents, cache=None):
    model.eval()
    drawn = torch.cat([model.decode(part) for part in latents.split(64)])
    model.train()
    if cache is None:
        return distance(distance.statistics(real), distance.statistics(drawn))  # the cause
    if "real" not in cache:
        cache["real"] = distance.statistics(real)
    return distance(cache["real"], distance.statistics(drawn))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--every", type=int, default=12)
    parser.add_argument("--size", type=int, default=48)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    images, real = flowers(1500, args.size, generator), flowers(1024, args.size, generator)
    model, distance = VAE(args.size), FrechetDistance()
    latents = torch.randn(128, model.latent, generator=generator)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    cache, best = {} if args.fixed else None, float("inf")
    began = time.perf_counter()
    for step in range(1, args.steps + 1):
        batch = images[torch.randint(len(images), (32,), generator=generator)]
        drawn, divergence = model(batch)
        rebuilt = F.mse_loss(drawn, batch, reduction="sum") / len(batch)
        loss = rebuilt + 0.5 * divergence
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % args.every == 0:
            score = evaluate(model, distance, real, latents, cache)
            best = min(best, score)
            print(f"step {step} loss {loss.item():.3f} distance {score:.5f} best {best:.5f}", flush=True)
    print(f"{(time.perf_counter() - began) / args.steps * 1e3:.2f} ms per step")


if __name__ == "__main__":
    main()
