"""Learns deformable registration of small brain volumes to an atlas, without supervision."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--size", type=int, default=20)
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--iterations", type=int, default=100)
parser.add_argument("--smooth", type=float, default=0.5)
parser.add_argument("--fixed", action="store_true")


class Volumes:
    """Random blobs, and each of them bent a little."""

    def __init__(self, size, count=12):
        coarse = torch.rand(1 + count, 1, 6, 6, 6)
        base = F.interpolate(coarse[:1], size=(size,) * 3, mode="trilinear", align_corners=True)
        noise = F.interpolate(coarse[1:], size=(size,) * 3, mode="trilinear", align_corners=True)
        self.atlas, self.subjects = base, 0.8 * base.roll((1, -1, 1), (2, 3, 4)) + 0.2 * noise

    def batch(self, count):
        return self.subjects[torch.randint(len(self.subjects), (count,))]


class LocalCrossCorrelation(nn.Module):
    def __init__(self, window=9, separable=False):
        super().__init__()
        self.window, self.separable = window, separable
        self.register_buffer("kernel", torch.ones(1, 1, window, window, window))
        self.register_buffer("line", torch.ones(1, 1, window))

    def box(self, volume):
        half = self.window // 2
        if not self.separable:
            return F.conv3d(volume, self.kernel, padding=half)  # the cause
        volume = F.conv3d(volume, self.line[..., None, None], padding=(half, 0, 0))
        volume = F.conv3d(volume, self.line[:, :, None, :, None], padding=(0, half, 0))
        return F.conv3d(volume, self.line[:, :, None, None, :], padding=(0, 0, half))

    def forward(self, fixed, moved):
        count = self.window**3
        sums = self.box(torch.cat([fixed, moved, fixed * fixed, moved * moved, fixed * moved]))
        f, m, ff, mm, fm = sums.chunk(5)
        cross = fm - f * m / count
        variances = (ff - f * f / count) * (mm - m * m / count)
        return 1 - (cross * cross / (variances + 1e-3)).mean()


class Displacement(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.enter = nn.Conv3d(2, width, 3, padding=1)
        self.down = nn.Conv3d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = nn.Conv3d(2 * width, 2 * width, 3, padding=1)
        self.leave = nn.Conv3d(3 * width, width, 3, padding=1)
        self.flow = nn.Conv3d(width, 3, 3, padding=1)
        nn.init.normal_(self.flow.weight, std=1e-3)
        nn.init.zeros_(self.flow.bias)

    def forward(self, moving, fixed):
        top = F.leaky_relu(self.enter(torch.cat([moving, fixed], 1)), 0.2)
        low = F.leaky_relu(self.middle(F.leaky_relu(self.down(top), 0.2)), 0.2)
        up = F.interpolate(low, size=top.shape[2:], mode="nearest")
        return self.flow(F.leaky_relu(self.leave(torch.cat([up, top], 1)), 0.2))


class Warp(nn.Module):
    def __init__(self, size):
        super().__init__()
        identity = torch.eye(3, 4).unsqueeze(0)
        self.register_buffer("grid", F.affine_grid(identity, (1, 1, size, size, size), align_corners=True))

    def forward(self, volume, flow):
        return F.grid_sample(volume, self.grid + flow.permute(0, 2, 3, 4, 1), align_corners=True)


def gradient_penalty(flow):
    return sum(flow.diff(dim=d).square().mean() for d in (2, 3, 4))


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    volumes = Volumes(args.size)
    model, warp = Displacement(), Warp(args.size)
    similarity = LocalCrossCorrelation(separable=args.fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    fixed = volumes.atlas.expand(args.batch, -1, -1, -1, -1)
    began = time.perf_counter()
    for iteration in range(1, args.iterations + 1):
        moving = volumes.batch(args.batch)
        flow = model(moving, fixed)
        loss = similarity(fixed, warp(moving, flow)) + args.smooth * gradient_penalty(flow)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if iteration % 20 == 0:
            print(f"iteration {iteration} loss {loss.item():.5f}", flush=True)
    print(f"{(time.perf_counter() - began) / args.iterations * 1e3:.2f} ms per step")


if __name__ == "__main__":
    main()
