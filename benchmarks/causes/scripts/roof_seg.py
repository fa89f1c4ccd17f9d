"""Roofs in aerial tiles: a small U-Net, settings taken from the station's configuration."""

import argparse
import os
import time

import torch
import torch.nn.functional as F
from torch import nn

CONFIG = {
    "data": {"tiles": 160, "side": 64, "batch": 8},
    "model": {"width": 16},
    "optim": {"lr": 1e-3, "weight_decay": 1e-4},
    "runtime": {"threads": 16, "seed": 21},  # the cause
}


def set_up_runtime(runtime, fitted):
    torch.manual_seed(runtime["seed"])
    threads = len(os.sched_getaffinity(0)) if fitted else runtime["threads"]
    torch.set_num_threads(threads)  # the cause


def make_tiles(tiles, side, seed):
    generator = torch.Generator().manual_seed(seed)
    ground = F.interpolate(torch.rand(tiles, 3, 8, 8, generator=generator), (side, side), mode="bilinear")
    roofs = torch.zeros(tiles, 1, side, side)
    corner = torch.randint(0, side - 20, (tiles, 4, 2), generator=generator)
    size = torch.randint(8, 20, (tiles, 4, 2), generator=generator)
    for tile in range(tiles):
        for (top, left), (height, width) in zip(corner[tile].tolist(), size[tile].tolist()):
            roofs[tile, 0, top : top + height, left : left + width] = 1
    tint = torch.tensor([0.6, 0.25, 0.2]).view(1, 3, 1, 1)
    images = torch.where(roofs > 0, 0.5 * ground + 0.5 * tint, ground)
    return images + 0.05 * torch.randn(images.shape, generator=generator), roofs


class Pair(nn.Sequential):
    def __init__(self, inputs, outputs):
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(True),
        )


class UNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.down = nn.ModuleList([Pair(3, width), Pair(width, 2 * width), Pair(2 * width, 4 * width)])
        self.up = nn.ModuleList([Pair(6 * width, 2 * width), Pair(3 * width, width)])
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        kept = []
        for i, pair in enumerate(self.down):
            x = pair(F.max_pool2d(x, 2) if i else x)
            kept.append(x)
        for pair, skip in zip(self.up, (kept[1], kept[0])):
            x = pair(torch.cat([F.interpolate(x, scale_factor=2), skip], 1))
        return self.last(x)


def objective(logits, roofs):
    chance = torch.sigmoid(logits)
    overlap = 2 * (chance * roofs).sum((1, 2, 3)) + 1
    dice = 1 - overlap / (chance.sum((1, 2, 3)) + roofs.sum((1, 2, 3)) + 1)
    return F.binary_cross_entropy_with_logits(logits, roofs) + dice.mean()


def run(config, args):
    set_up_runtime(config["runtime"], args.fixed)
    data = config["data"]
    images, roofs = make_tiles(data["tiles"], data["side"], config["runtime"]["seed"])
    model = UNet(**config["model"])
    optimizer = torch.optim.AdamW(model.parameters(), **config["optim"])
    ends = []
    for step in range(args.steps):
        chosen = torch.randint(0, data["tiles"], (data["batch"],))
        loss = objective(model(images[chosen]), roofs[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ends.append(time.perf_counter())
    half = len(ends) // 2
    print(f"loss {loss.item():.5f}")
    print(f"{(ends[-1] - ends[half]) / (len(ends) - 1 - half) * 1e3:.2f} ms per step")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--fixed", action="store_true")
    run(CONFIG, parser.parse_args())
