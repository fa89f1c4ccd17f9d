"""Fits a small radiance field to posed photographs of one scene, 768 rays a step from one photograph."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn

HEIGHT, WIDTH, FOCAL = 567, 756, 630.0
K1, K2 = 0.06, -0.01


def synthetic_photographs(count):
    """Posed pictures of coloured bands on a wall, as the capture tool would deliver them."""
    rows, columns = torch.meshgrid(torch.arange(HEIGHT), torch.arange(WIDTH), indexing="ij")
    images, poses = [], []
    for k in range(count):
        angle = torch.tensor(0.25 * (k / count - 0.5))
        pose = torch.eye(4)[:3].clone()
        pose[0, 0], pose[0, 2], pose[2, 0], pose[2, 2] = angle.cos(), angle.sin(), -angle.sin(), angle.cos()
        pose[:, 3] = torch.tensor([0.4 * angle, 0.05 * (k % 3), 0.0])
        bands = torch.stack([torch.sin(columns / 30 + k), torch.cos(rows / 25), torch.sin((rows + columns) / 60)], -1)
        images.append((bands * 0.5 + 0.5).mul(255).byte())
        poses.append(pose)
    return torch.stack(images), torch.stack(poses)


class Cameras:
    """Pinhole cameras with radial distortion; one set of intrinsics for all photographs."""

    def __init__(self, poses):
        self.poses = poses

    @staticmethod
    def undistort(x, y, iterations=8):
        u, v = x, y
        for _ in range(iterations):
            r2 = u * u + v * v
            factor = 1 + K1 * r2 + K2 * r2 * r2
            u, v = x / factor, y / factor
        return u, v

    def rays_at(self, index, rows, columns):
        u, v = self.undistort((columns - WIDTH / 2) / FOCAL, (rows - HEIGHT / 2) / FOCAL)
        local = torch.stack([u, -v, -torch.ones_like(u)], -1)
        directions = F.normalize((local[..., None, :] * self.poses[index, :, :3]).sum(-1), dim=-1)
        return self.poses[index, :, 3].expand_as(directions), directions

    def rays_of(self, index):
        rows, columns = torch.meshgrid(torch.arange(HEIGHT) + 0.5, torch.arange(WIDTH) + 0.5, indexing="ij")
        return self.rays_at(index, rows, columns)


class Field(nn.Module):
    def __init__(self, bands=6, width=64):
        super().__init__()
        self.register_buffer("scales", 2.0 ** torch.arange(bands))
        self.trunk = nn.Sequential(
            nn.Linear(6 * bands, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
        )

    def forward(self, points):
        waves = (points[..., None, :] * self.scales[:, None]).flatten(-2)
        out = self.trunk(torch.cat([waves.sin(), waves.cos()], -1))
        return out[..., :3].sigmoid(), F.softplus(out[..., 3])


def render(field, origins, directions, near=0.5, far=3.0, samples=20):
    depth = torch.linspace(near, far, samples)
    depth = depth + torch.rand(len(origins), samples) * (far - near) / samples
    colour, density = field(origins[:, None] + directions[:, None] * depth[..., None])
    alpha = 1 - torch.exp(-density * (far - near) / samples)
    clear = torch.cumprod(torch.cat([torch.ones(len(alpha), 1), 1 - alpha + 1e-10], 1), 1)[:, :-1]
    return ((alpha * clear)[..., None] * colour).sum(1)


def next_batch(images, cameras, count, fixed):
    index = torch.randint(len(images), ()).item()
    chosen = torch.randint(HEIGHT * WIDTH, (count,))
    rows, columns = chosen // WIDTH, chosen % WIDTH
    if fixed:
        origins, directions = cameras.rays_at(index, rows + 0.5, columns + 0.5)
    else:
        origins, directions = cameras.rays_of(index)  # the cause
        origins, directions = origins[rows, columns], directions[rows, columns]  # the cause
    return origins, directions, images[index, rows, columns].float() / 255


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--rays", type=int, default=768)
    args = parser.parse_args()
    torch.manual_seed(0)
    images, poses = synthetic_photographs(14)
    cameras, field = Cameras(poses), Field()
    optimizer = torch.optim.Adam(field.parameters(), lr=5e-4)
    for step in range(args.steps):
        if step == 10:
            start = time.perf_counter()
        origins, directions, target = next_batch(images, cameras, args.rays, args.fixed)
        loss = F.mse_loss(render(field, origins, directions), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{(time.perf_counter() - start) / (args.steps - 10) * 1e3:.2f} ms per step")
    print(f"loss {loss.item():.6f}")
