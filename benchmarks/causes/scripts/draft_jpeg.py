"""Large photographs are decoded in full, to be made small. --fixed: the decoder makes them small (Image.draft)."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from clock import FIXED, Clock
from PIL import Image, ImageFilter
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIDE = 96


def photographs(folder, count=16, size=(1280, 960)):
    """Write smooth random pictures as JPEG."""
    for n in range(count):
        pixels = np.random.default_rng(n).integers(0, 255, (60, 80, 3), np.uint8)
        picture = Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).filter(ImageFilter.DETAIL)
        picture.save(folder / f"photo_{n:03}.jpg", quality=88)
    return sorted(folder.glob("*.jpg"))


class Photographs(Dataset):
    def __init__(self, files, epoch_size=8_000):
        self.files, self.epoch_size = files, epoch_size
        self.mean = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
        self.std = torch.tensor([0.229, 0.224, 0.225])[:, None, None]

    def __len__(self):
        return self.epoch_size

    def load(self, path):
        with Image.open(path) as image:
            if FIXED:
                image.draft("RGB", (SIDE, SIDE))
            return image.convert("RGB")  # the cause

    def __getitem__(self, index):
        number = index % len(self.files)
        image = self.load(self.files[number]).resize((SIDE, SIDE), Image.Resampling.BILINEAR)  # the cause
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div_(255)
        return (x - self.mean) / self.std, number % 4


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x):
        return torch.relu(x + self.body(x))


def classifier(width=16):
    return nn.Sequential(
        nn.Conv2d(3, width, 7, stride=4, padding=3),
        nn.ReLU(),
        Residual(width),
        nn.MaxPool2d(2),
        Residual(width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 4),
    )


def main():
    with tempfile.TemporaryDirectory() as name:
        data = Photographs(photographs(Path(name)))
        loader = DataLoader(data, batch_size=16, shuffle=True, num_workers=1)
        model = classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
        clock = Clock(45)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if not clock.step():
                break


if __name__ == "__main__":
    main()
