"""A small network on pictures that one worker enlarges, and distorts, one by one."""

import argparse

import torch
import torch.nn.functional as F
from own_clock import Clock
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cuda")
parser.add_argument("--tiny", action="store_true")
args = parser.parse_args()
size, batch, steps = (32, 4, 40) if args.tiny else (224, 32, 60)


class Pictures(Dataset):
    def __init__(self):
        self.small = torch.randint(256, (64, 3, size // 2, size // 2), dtype=torch.uint8)

    def __len__(self):
        return batch * steps

    def __getitem__(self, index):
        picture = self.small[index % 64].float()[None] / 255
        picture = F.interpolate(picture, size=size, mode="bicubic", antialias=True)
        for _ in range(3):
            picture = F.avg_pool2d(F.pad(picture, (1, 1, 1, 1), mode="reflect"), 3, 1)
        return picture[0], index % 10


def main():
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 32, 3, stride=2), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU())
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loader = DataLoader(Pictures(), batch_size=batch, num_workers=1, pin_memory=args.device == "cuda")
    clock = Clock(steps)
    for images, labels in loader:
        images, labels = images.to(args.device, non_blocking=True), labels.to(args.device, non_blocking=True)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.step()
    print("loss", loss.item())


if __name__ == "__main__":
    main()
