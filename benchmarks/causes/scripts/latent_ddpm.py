"""Latent diffusion on a small texture set: frozen autoencoder + denoiser in latent space."""

import argparse
import math
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F


def prepare(folder, n=512):
    g = torch.Generator().manual_seed(3)
    x = torch.zeros(n, 3, 64, 64)
    for s in (4, 8, 16):
        x += F.interpolate(torch.randn(n, 3, s, s, generator=g), size=64, mode="bilinear") / 2
    torch.save(((x.clamp(-1, 1) + 1) * 127.5).to(torch.uint8), os.path.join(folder, "textures.pt"))
    torch.manual_seed(4)
    torch.save(VAEEncoder().state_dict(), os.path.join(folder, "vae_encoder.pt"))


class ResBlock(nn.Module):
    def __init__(self, cin, cout, emb=None):
        super().__init__()
        self.n1, self.c1 = nn.GroupNorm(8, cin), nn.Conv2d(cin, cout, 3, padding=1)
        self.n2, self.c2 = nn.GroupNorm(8, cout), nn.Conv2d(cout, cout, 3, padding=1)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()
        self.emb = nn.Linear(emb, cout) if emb else None

    def forward(self, x, e=None):
        h = self.c1(F.silu(self.n1(x)))
        if self.emb is not None:
            h = h + self.emb(e)[:, :, None, None]
        return self.skip(x) + self.c2(F.silu(self.n2(h)))


class VAEEncoder(nn.Module):
    """64x64x3 image -> 16x16x4 latent mean and log-variance."""

    def __init__(self, ch=32, z=4):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, ch, 3, padding=1),
            ResBlock(ch, ch),
            nn.Conv2d(ch, ch, 3, 2, 1),
            ResBlock(ch, 2 * ch),
            nn.Conv2d(2 * ch, 2 * ch, 3, 2, 1),
            ResBlock(2 * ch, 2 * ch),
            nn.GroupNorm(8, 2 * ch),
            nn.SiLU(),
            nn.Conv2d(2 * ch, 2 * z, 3, padding=1),
        )

    def forward(self, x):
        return self.net(x).chunk(2, dim=1)


class Denoiser(nn.Module):
    def __init__(self, ch=48, z=4, emb=128):
        super().__init__()
        self.ch = ch
        self.time = nn.Sequential(nn.Linear(ch, emb), nn.SiLU(), nn.Linear(emb, emb))
        self.inp = nn.Conv2d(z, ch, 3, padding=1)
        self.d1, self.down = ResBlock(ch, ch, emb), nn.Conv2d(ch, 2 * ch, 3, 2, 1)
        self.mid = ResBlock(2 * ch, 2 * ch, emb)
        self.up, self.u1 = nn.Conv2d(2 * ch, ch, 3, padding=1), ResBlock(2 * ch, ch, emb)
        self.out = nn.Sequential(nn.GroupNorm(8, ch), nn.SiLU(), nn.Conv2d(ch, z, 3, padding=1))

    def forward(self, x, t):
        freqs = torch.exp(-math.log(1e4) * torch.arange(self.ch // 2) / (self.ch // 2))
        a = t[:, None] * freqs
        e = self.time(torch.cat([a.sin(), a.cos()], 1))
        h = self.d1(self.inp(x), e)
        m = self.mid(self.down(h), e)
        m = self.up(F.interpolate(m, scale_factor=2.0))
        return self.out(self.u1(torch.cat([h, m], 1), e))


def to_float(images):
    return images.float() / 127.5 - 1


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default=os.path.join(tempfile.gettempdir(), "latent_ddpm"))
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--fixed", action="store_true")
    args = ap.parse_args()
    if not Path(os.path.join(args.data, "vae_encoder.pt")).exists():
        Path(args.data).mkdir(parents=True, exist_ok=True)
        prepare(args.data)

    begin = time.perf_counter()
    images = torch.load(os.path.join(args.data, "textures.pt"))
    vae = VAEEncoder()
    vae.load_state_dict(torch.load(os.path.join(args.data, "vae_encoder.pt")))
    vae.requires_grad_(False).eval()
    torch.manual_seed(0)
    model = Denoiser()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-4)
    abar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)

    moments = None
    if args.fixed:
        with torch.no_grad():
            parts = [vae(to_float(b)) for b in images.split(args.batch)]
        moments = torch.cat([m for m, _ in parts]), torch.cat([v for _, v in parts])

    step, skip, t0 = 0, 5, None
    for epoch in range(args.epochs):
        total, batches = torch.zeros(()), torch.randperm(len(images)).split(args.batch)
        for idx in batches:
            if step == skip:
                t0 = time.perf_counter()
            if args.fixed:
                mean, logvar = moments[0][idx], moments[1][idx]
            else:
                with torch.no_grad():
                    mean, logvar = vae(to_float(images[idx]))  # the cause
            z = mean + (0.5 * logvar).exp() * torch.randn_like(mean)
            t = torch.randint(0, 1000, (len(idx),))
            noise = torch.randn_like(z)
            a = abar[t][:, None, None, None]
            loss = F.mse_loss(model(a.sqrt() * z + (1 - a).sqrt() * noise, t), noise)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
            step += 1
        print(f"epoch {epoch}  loss {total.item() / len(batches):.5f}", flush=True)
    end = time.perf_counter()
    print(f"total {end - begin:.1f} s")
    print(f"{1e3 * (end - t0) / (step - skip):.1f} ms per step")


if __name__ == "__main__":
    main()
