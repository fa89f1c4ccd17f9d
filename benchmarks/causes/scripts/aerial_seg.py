"""A segmentation network learns from aerial tiles whose masks are coloured PNG files. --fixed: the remedy."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from clock import FIXED, Clock
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIDE = 128
PALETTE = [(255, 255, 255), (0, 0, 255), (0, 255, 255), (0, 255, 0), (255, 255, 0), (255, 0, 0)]


def write_tiles(folder, count=48):
    rng = np.random.default_rng(0)
    colors = np.array(PALETTE, np.uint8)
    for n in range(count):
        classes = np.kron(rng.integers(0, len(PALETTE), (8, 8)), np.ones((SIDE // 8, SIDE // 8), int))
        noise = rng.integers(0, 60, (SIDE, SIDE, 3))
        Image.fromarray((colors[classes] * 0.7 + noise).astype(np.uint8)).save(folder / f"{n:03}_image.png")
        Image.fromarray(colors[classes]).save(folder / f"{n:03}_mask.png")


class AerialTiles(Dataset):
    def __init__(self, folder, repeats=40):
        self.images = sorted(folder.glob("*_image.png")) * repeats
        self.masks = sorted(folder.glob("*_mask.png")) * repeats
        self.color_to_class = {color: n for n, color in enumerate(PALETTE)}
        self.codes = np.array([r << 16 | g << 8 | b for r, g, b in PALETTE])
        self.order = np.argsort(self.codes)

    def __len__(self):
        return len(self.images)

    def encode(self, mask):
        if FIXED:
            packed = mask.astype(np.int64) @ np.array([1 << 16, 1 << 8, 1])
            return self.order[np.searchsorted(self.codes[self.order], packed)]
        label = np.zeros(mask.shape[:2], np.int64)
        for y in range(mask.shape[0]):  # the cause
            for x in range(mask.shape[1]):  # the cause
                label[y, x] = self.color_to_class[tuple(mask[y, x])]  # the cause
        return label

    def __getitem__(self, index):
        image = np.array(Image.open(self.images[index]).convert("RGB"), np.float32) / 255
        mask = np.array(Image.open(self.masks[index]).convert("RGB"))
        return torch.from_numpy(image).permute(2, 0, 1), torch.from_numpy(self.encode(mask))


def block(inputs, outputs, stride=1):
    conv = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


def main():
    with tempfile.TemporaryDirectory() as name:
        write_tiles(Path(name))
        loader = DataLoader(AerialTiles(Path(name)), batch_size=4, shuffle=True, num_workers=1)
        upsample = nn.Upsample(scale_factor=4, mode="bilinear", align_corners=False)
        model = nn.Sequential(
            block(3, 16, 2), block(16, 32, 2), block(32, 32), nn.Conv2d(32, len(PALETTE), 1), upsample
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        clock = Clock(70)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not clock.step():
                break
        print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
