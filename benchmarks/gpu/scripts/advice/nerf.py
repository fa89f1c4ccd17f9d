"""A radiance field learns from pictures, some rays in each step. --fixed: only these rays are computed."""

import numpy as np
import torch
import torch.nn.functional as F
from clock import Clock, options
from torch import Tensor, nn

args = options(steps=100)
width, rays, samples, size, pictures = (32, 64, 16, 40, 4) if args.tiny else (256, 8192, 64, 480, 60)
focal = 1.4 * size
near, far = 2.0, 6.0


def poses(count: int) -> np.ndarray:
    """Return cameras on a sphere, which look at its centre."""
    drawn = np.random.default_rng(0).standard_normal((count, 3)).astype(np.float32)
    back = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    right = np.cross(np.array([0, 0, 1], np.float32), back)
    right /= np.linalg.norm(right, axis=1, keepdims=True)
    return np.stack([right, np.cross(back, right), back, 4 * back], 2).astype(np.float32)


def get_rays(pose: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the origins and directions of the chosen pixels."""
    pixels = chosen if args.fixed else np.arange(size * size)  # the cause
    down, across = np.divmod(pixels, size)
    x, y = (across - size / 2) / focal, -(down - size / 2) / focal
    directions = np.stack([x, y, -np.ones_like(x)], -1).astype(np.float32)
    directions = np.sum(directions[:, None, :] * pose[:, :3], -1)  # the cause
    origins = np.broadcast_to(pose[:, 3], directions.shape).copy()
    return (origins, directions) if args.fixed else (origins[chosen], directions[chosen])


class Field(nn.Module):
    def __init__(self, frequencies: int = 10) -> None:
        super().__init__()
        self.register_buffer("waves", 2.0 ** torch.arange(frequencies))
        seen = 3 + 6 * frequencies
        self.first = nn.Sequential(nn.Linear(seen, width), nn.ReLU(), *self.layers(3))
        self.second = nn.Sequential(nn.Linear(width + seen, width), nn.ReLU(), *self.layers(3))
        self.out = nn.Linear(width, 4)

    @staticmethod
    def layers(count: int) -> list[nn.Module]:
        return [layer for _ in range(count) for layer in (nn.Linear(width, width), nn.ReLU())]

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        angles = (points.unsqueeze(-1) * self.waves).flatten(-2)
        seen = torch.cat([points, angles.sin(), angles.cos()], -1)
        found = self.out(self.second(torch.cat([self.first(seen), seen], -1))).float()
        return found[..., :3].sigmoid(), F.softplus(found[..., 3])


def render(field: Field, origins: Tensor, directions: Tensor) -> Tensor:
    depth = torch.linspace(near, far, samples, device=origins.device)
    points = origins.unsqueeze(1) + directions.unsqueeze(1) * depth.unsqueeze(1)
    colour, density = field(points)
    thickness = density * (far - near) / samples
    passed = torch.exp(-(thickness.cumsum(1) - thickness))
    weight = passed * (1 - torch.exp(-thickness))
    return (weight.unsqueeze(2) * colour).sum(1)


cameras = poses(pictures)
images = torch.rand(pictures, size * size, 3, device=args.device)
field = Field().to(args.device)
optimizer = torch.optim.Adam(field.parameters(), lr=5e-4, fused=True)
drawn = np.random.default_rng(1)
clock = Clock(args)
while True:
    picture = int(drawn.integers(pictures))
    chosen = drawn.integers(size * size, size=rays)
    origins, directions = get_rays(cameras[picture], chosen)  # the cause
    origins, directions = torch.from_numpy(origins).to(args.device), torch.from_numpy(directions).to(args.device)
    wanted = images[picture].index_select(0, torch.from_numpy(chosen).to(args.device))
    with torch.autocast(args.device, torch.bfloat16):
        loss = F.mse_loss(render(field, origins, directions), wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
