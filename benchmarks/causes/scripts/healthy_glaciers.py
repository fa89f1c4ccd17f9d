"""Edges of glaciers in satellite scenes: a residual convolution network on crops."""

import argparse
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


def make_scenes(count=12, side=384, seed=5):
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:side, 0:side].astype(np.float32) / side
    scenes, ice = [], []
    for _ in range(count):
        edge = 0.5 + 0.2 * np.sin(6 * x + rng.uniform(0, 6)) + 0.05 * np.sin(40 * x)
        frozen = y > edge
        bands = [np.where(frozen, 0.7, 0.3) + 0.1 * np.sin(9 * y * k) for k in (1, 2, 3, 4)]
        noisy = np.stack(bands) + 0.05 * rng.normal(size=(4, side, side))
        scenes.append((np.clip(noisy, 0, 1) * 255).astype(np.uint8))
        ice.append(frozen.astype(np.uint8))
    return torch.from_numpy(np.stack(scenes)), torch.from_numpy(np.stack(ice))


class Crops(Dataset):
    """Random crops, as bytes; the batch is made float after it has been put together."""

    def __init__(self, scenes, ice, crop, length, seed):
        self.scenes, self.ice, self.crop = scenes, ice, crop
        generator = torch.Generator().manual_seed(seed)
        highest = scenes.shape[-1] - crop
        self.scene = torch.randint(0, len(scenes), (length,), generator=generator).tolist()
        self.corner = torch.randint(0, highest, (length, 2), generator=generator).tolist()

    def __len__(self):
        return len(self.scene)

    def __getitem__(self, index):
        scene, (top, left) = self.scene[index], self.corner[index]
        rows, columns = slice(top, top + self.crop), slice(left, left + self.crop)
        return self.scenes[scene, :, rows, columns], self.ice[scene, rows, columns]


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return x + self.second(F.relu(self.first(F.relu(x))))


def build(width=48, depth=5):
    return nn.Sequential(
        nn.Conv2d(4, width, 5, stride=2, padding=2),
        *[Residual(width) for _ in range(depth)],
        nn.ReLU(),
        nn.Conv2d(width, 4, 1),
        nn.PixelShuffle(2),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--crop", type=int, default=96)
    parser.add_argument("--fixed", action="store_true", help="changes nothing here")
    args = parser.parse_args()
    torch.manual_seed(0)
    crops = Crops(*make_scenes(), args.crop, args.steps * args.batch, seed=1)
    loader = DataLoader(crops, batch_size=args.batch)
    model = build().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    ends, total = [], torch.zeros(())
    for step, (images, ice) in enumerate(loader, 1):
        images = images.contiguous(memory_format=torch.channels_last).float().div_(255)
        loss = F.binary_cross_entropy_with_logits(model(images)[:, 0], ice.float())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        total += loss.detach()
        if step % 20 == 0:
            print(f"step {step}: mean loss {total.item() / 20:.4f}")
            total.zero_()
        ends.append(time.perf_counter())
    half = len(ends) // 2
    print(f"loss {loss.item():.6f}")
    print(f"{(ends[-1] - ends[half]) / (len(ends) - 1 - half) * 1e3:.2f} ms per step")


if __name__ == "__main__":
    main()
