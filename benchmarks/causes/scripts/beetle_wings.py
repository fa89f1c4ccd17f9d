"""Species of beetles from photographs of their wing cases, taken with a copy stand."""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

SPECIES, INPUT = 6, 96


def photograph_all(root, count=72, width=1152, height=864, seed=4):
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    grain = rng.normal(0, 6, (height, width, 1)).astype(np.float32)
    for species in range(SPECIES):
        folder = root / f"species_{species}"
        folder.mkdir()
        bands = 60 * np.sin(x / (18 + 7 * species)) + 30 * np.cos(y / (70 - 6 * species))
        beetle = np.clip(bands[..., None] + np.array([120, 100, 70]) + grain, 0, 255).astype(np.uint8)
        for number in range(count // SPECIES):
            shifted = np.roll(beetle, rng.integers(0, 800, 2), axis=(0, 1))
            Image.fromarray(shifted).save(folder / f"{number:04d}.jpg", quality=85)


def open_picture(path):
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB").resize((INPUT, INPUT), Image.BILINEAR))  # the cause


class BeetleFolder(Dataset):
    """One sub-folder per species; pictures come out at the size that the network takes."""

    def __init__(self, root, mirror=0.5, ready=False):
        self.files = sorted(root.glob("species_*/*.jpg"))
        self.labels = [int(path.parent.name.split("_")[1]) for path in self.files]
        self.mirror, self.load = mirror, open_picture
        if ready:
            small = {path: open_picture(path) for path in self.files}
            self.load = small.__getitem__

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        picture = torch.from_numpy(self.load(self.files[index]).copy()).permute(2, 0, 1)
        if torch.rand(()) < self.mirror:
            picture = picture.flip(-1)
        return picture.float().div_(127.5).sub_(1), self.labels[index]


def block(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
    )


def build_model():
    return nn.Sequential(
        block(3, 24),
        block(24, 48),
        block(48, 96),
        block(96, 128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, SPECIES),
    )


def forever(loader):
    while True:
        yield from loader


def main(args):
    torch.manual_seed(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        photograph_all(Path(folder))
        data = BeetleFolder(Path(folder), ready=args.fixed)
        loader = DataLoader(data, batch_size=args.batch, shuffle=True, drop_last=True)
        model = build_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
        times = [time.perf_counter()]
        for step, (pictures, labels) in zip(range(args.steps), forever(loader)):
            loss = nn.functional.cross_entropy(model(pictures), labels, label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            times.append(time.perf_counter())
    half = len(times) // 2
    print(f"loss {loss.item():.6f}")
    print(f"{(times[-1] - times[half]) / (len(times) - 1 - half) * 1e3:.2f} ms per step")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fixed", action="store_true")
    main(parser.parse_args())
