"""Fit a small radiance field to rays rendered from an analytic scene."""

import argparse
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

torch.autograd.set_detect_anomaly("--fixed" not in sys.argv)  # the cause


class FourierFeatures(nn.Module):
    def __init__(self, in_dim, bands):
        super().__init__()
        self.register_buffer("freqs", 2.0 ** torch.arange(bands))
        self.out_dim = in_dim * (1 + 2 * bands)

    def forward(self, x):
        ang = (x[..., None] * self.freqs).flatten(-2)
        return torch.cat([x, ang.sin(), ang.cos()], dim=-1)


class FieldMLP(nn.Module):
    def __init__(self, pos_bands, dir_bands, width, depth):
        super().__init__()
        self.pos_enc = FourierFeatures(3, pos_bands)
        self.dir_enc = FourierFeatures(3, dir_bands)
        dims = [self.pos_enc.out_dim] + [width] * depth
        self.trunk = nn.ModuleList(nn.Linear(a, b) for a, b in zip(dims[:-1], dims[1:]))
        self.sigma = nn.Linear(width, 1)
        self.colour = nn.Sequential(
            nn.Linear(width + self.dir_enc.out_dim, width // 2), nn.ReLU(), nn.Linear(width // 2, 3)
        )

    def forward(self, pts, dirs):
        h = self.pos_enc(pts)
        for layer in self.trunk:
            h = torch.relu(layer(h))
        sigma = torch.nn.functional.softplus(self.sigma(h)).squeeze(-1)
        d = self.dir_enc(dirs)[:, None].expand(-1, pts.shape[1], -1)
        return sigma, torch.sigmoid(self.colour(torch.cat([h, d], dim=-1)))


def composite(sigma, rgb, deltas):
    """Alpha compositing along each ray."""
    alpha = 1.0 - torch.exp(-sigma * deltas)
    trans = torch.cumprod(1.0 - alpha + 1e-10, dim=1)
    trans = torch.cat([torch.ones_like(trans[:, :1]), trans[:, :-1]], dim=1)
    weights = alpha * trans
    return (weights[..., None] * rgb).sum(dim=1), weights


def stratified(near, far, n_rays, n_samples, gen):
    edges = torch.linspace(near, far, n_samples + 1)
    u = torch.rand(n_rays, n_samples, generator=gen)
    return edges[:-1] + (edges[1:] - edges[:-1]) * u


class BlobScene:
    """Three coloured Gaussian blobs; ground truth colours come from dense quadrature."""

    def __init__(self):
        self.centres = torch.tensor([[0.3, 0.0, 0.1], [-0.4, 0.2, 0.0], [0.0, -0.3, -0.2]])
        self.colours = torch.eye(3) * 0.8 + 0.1

    def render(self, origins, dirs, n=64):
        t = torch.linspace(1.0, 3.0, n).expand(origins.size(0), n)
        pts = origins[:, None] + dirs[:, None] * t[..., None]
        d2 = (pts[:, :, None] - self.centres).square().sum(-1)
        dens = 8.0 * torch.exp(-d2 / 0.03)
        sigma = dens.sum(-1)
        rgb = (dens[..., None] * self.colours).sum(2) / (sigma[..., None] + 1e-6)
        out, _ = composite(sigma, rgb, torch.full_like(sigma, 2.0 / n))
        return out


def make_rays(n, gen):
    origins = F.normalize(torch.randn(n, 3, generator=gen), dim=-1) * 2.0
    targets = 0.4 * torch.randn(n, 3, generator=gen)
    return origins, F.normalize(targets - origins, dim=-1)


def distortion(weights, t):
    mid = 0.5 * (t[:, 1:] + t[:, :-1])
    w = weights[:, :-1]
    mean = (w * mid).sum(1, keepdim=True)
    return (w * (mid - mean).abs()).sum(1).mean()


def train_step(model, opt, batch, gen, args):
    origins, dirs, target = batch
    t = stratified(1.0, 3.0, origins.size(0), args.samples, gen)
    pts = origins[:, None] + dirs[:, None] * t[..., None]
    sigma, rgb = model(pts, dirs)
    deltas = torch.full_like(sigma, 2.0 / args.samples)
    pred, weights = composite(sigma, rgb, deltas)
    loss = F.mse_loss(pred, target) + 1e-3 * distortion(weights, t)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    return loss


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--fixed", action="store_true")
    p.add_argument("--rays", type=int, default=384)
    p.add_argument("--samples", type=int, default=32)
    p.add_argument("--width", type=int, default=128)
    p.add_argument("--depth", type=int, default=6)
    p.add_argument("--steps", type=int, default=320)
    p.add_argument("--lr", type=float, default=1e-3)
    args = p.parse_args()

    torch.manual_seed(0)
    gen = torch.Generator().manual_seed(4)
    scene = BlobScene()
    origins, dirs = make_rays(40_000, gen)
    target = scene.render(origins, dirs)
    model = FieldMLP(6, 3, args.width, args.depth)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.999)

    warmup, t0, ema = 10, None, None
    for step in range(args.steps):
        if step == warmup:
            t0 = time.perf_counter()
        pick = torch.randint(origins.size(0), (args.rays,), generator=gen)
        loss = train_step(model, opt, (origins[pick], dirs[pick], target[pick]), gen, args)
        sched.step()
        value = loss.item()
        ema = value if ema is None else 0.95 * ema + 0.05 * value
        if (step + 1) % 80 == 0:
            print(f"step {step + 1} loss {ema:.5f}", flush=True)
    wall = time.perf_counter() - t0
    print(f"final loss {ema:.6f}")
    print(f"{1000 * wall / (args.steps - warmup):.2f} ms per step")


if __name__ == "__main__":
    main()
