"""Each sample globs two folders for its image and its mask. --fixed: the names are made from the sample's name."""

import argparse
import io
import tempfile
from pathlib import Path

import numpy as np
import torch
from clock import Clock
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset


def make_folders(root, count):
    """Write small pictures and masks, as the data set of a competition has them."""
    rng = np.random.default_rng(0)
    written = []
    for _ in range(20):
        pair = []
        for high, mode in ((255, "RGB"), (2, "L")):
            pixels = rng.integers(0, high, (40, 40, 3) if mode == "RGB" else (40, 40), np.uint8)
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, "png")
            pair.append(buffer.getvalue())
        written.append(pair)
    for name in ("images", "masks"):
        (root / name).mkdir()
    for n in range(count):
        image, mask = written[n % 20]
        (root / "images" / f"car_{n:05}.png").write_bytes(image)
        (root / "masks" / f"car_{n:05}_mask.png").write_bytes(mask)


class BasicDataset(Dataset):
    def __init__(self, root, fixed):
        self.images_dir, self.masks_dir, self.fixed = root / "images", root / "masks", fixed
        self.ids = sorted(file.stem for file in self.images_dir.iterdir())

    def __len__(self):
        return len(self.ids)

    @staticmethod
    def preprocess(image, is_mask):
        pixels = np.asarray(image.resize((32, 32), Image.Resampling.NEAREST))
        if is_mask:
            return torch.from_numpy(pixels.astype(np.int64))
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy()).float() / 255

    def __getitem__(self, idx):
        name = self.ids[idx]
        if self.fixed:
            mask_file = [self.masks_dir / f"{name}_mask.png"]
            image_file = [self.images_dir / f"{name}.png"]
        else:
            mask_file = list(self.masks_dir.glob(f"{name}_mask.*"))  # the cause
            image_file = list(self.images_dir.glob(f"{name}.*"))  # the cause
        assert len(image_file) == len(mask_file) == 1, f"not one image and one mask of {name}"
        return {
            "image": self.preprocess(Image.open(image_file[0]), is_mask=False),
            "mask": self.preprocess(Image.open(mask_file[0]), is_mask=True),
        }


class SmallUNet(nn.Module):
    def __init__(self, classes=2, width=12):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.inner = nn.Sequential(
            nn.MaxPool2d(2), nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU()
        )
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.out = nn.Conv2d(2 * width, classes, 1)

    def forward(self, x):
        top = self.down(x)
        return self.out(torch.cat([top, self.up(self.inner(top))], dim=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_folders(Path(folder), 3_000)
        data = BasicDataset(Path(folder), args.fixed)
        loader = DataLoader(data, batch_size=16, shuffle=True, num_workers=args.workers, persistent_workers=True)
        model = SmallUNet()
        optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4, momentum=0.9)
        clock = Clock(150)
        for batch in loader:
            loss = nn.functional.cross_entropy(model(batch["image"]), batch["mask"])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if not clock.step():
                break
