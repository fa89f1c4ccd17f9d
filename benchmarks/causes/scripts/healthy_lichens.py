"""Kinds of lichen from JPEG photographs, decoded in one worker ahead of the training."""

import argparse
import io
import time

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset


def photographs(count, side=80, kinds=6, seed=8):
    rng = np.random.default_rng(seed)
    files, labels = [], rng.integers(kinds, size=count)
    for kind in labels:
        coarse = rng.integers(0, 255, (4 + kind, 4 + kind, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(coarse).resize((side, side), Image.BICUBIC).save(buffer, "JPEG", quality=90)
        files.append(buffer.getvalue())
    return files, torch.from_numpy(labels)


class Lichens(Dataset):
    def __init__(self, files, labels, crop=64):
        self.files, self.labels, self.crop = files, labels, crop

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        image = Image.open(io.BytesIO(self.files[index]))
        left, top = torch.randint(image.width - self.crop + 1, (2,)).tolist()
        pixels = np.asarray(image)[top : top + self.crop, left : left + self.crop]
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy()), self.labels[index]


class LichenNet(nn.Module):
    def __init__(self, kinds=6, width=24):
        super().__init__()
        self.register_buffer("mean", torch.full((1, 3, 1, 1), 127.0))
        sizes, layers = [3, width, 2 * width, 4 * width], []
        for a, b in zip(sizes[:-1], sizes[1:]):
            layers += [nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(4 * width, kinds)

    def forward(self, pixels):
        return self.head(self.body((pixels.float() - self.mean) / 64).mean((2, 3)))


def forever(loader):
    while True:
        yield from loader


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="changes nothing here")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=48)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loader = DataLoader(
        Lichens(*photographs(1920)),
        args.batch,
        shuffle=True,
        drop_last=True,
        num_workers=1,
        persistent_workers=True,
        prefetch_factor=4,
    )
    model = LichenNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=args.steps)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
    batches, seen = forever(loader), torch.zeros(())
    for step in range(args.steps):
        if step == 10:
            start = time.perf_counter()
        pixels, kinds = next(batches)
        loss = criterion(model(pixels), kinds)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        seen += loss.detach()
        if step % 100 == 99:
            print(f"step {step + 1}: {seen.item() / 100:.4f}")
            seen.zero_()
    print(f"{(time.perf_counter() - start) / (args.steps - 10) * 1e3:.2f} ms per step")
    print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
