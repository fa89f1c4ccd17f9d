"""A residual network classifies small pictures that are held in memory."""

import numpy as np
import torch
from clock import Clock
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIDE, CLASSES = 40, 10


class Pictures(Dataset):
    def __init__(self, count=1_600):
        rng = np.random.default_rng(0)
        self.labels = rng.integers(0, CLASSES, count)
        templates = rng.integers(0, 255, (CLASSES, 3, SIDE, SIDE))
        noise = rng.integers(-60, 60, (count, 3, SIDE, SIDE))
        self.images = np.clip(templates[self.labels] + noise, 0, 255).astype(np.uint8)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        if np.random.random() < 0.5:
            image = image[:, :, ::-1].copy()
        return torch.from_numpy(image), self.labels[index]


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x):
        return torch.relu(x + self.body(x))


def network(width=32):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1),
        nn.ReLU(),
        Residual(width),
        nn.MaxPool2d(2),
        Residual(width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, CLASSES),
    )


def main():
    loader = DataLoader(Pictures(), batch_size=32, shuffle=True, num_workers=1, persistent_workers=True, drop_last=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    clock = Clock(120)
    running = True
    while running:
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images.float().div_(255)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running = clock.step()
            if not running:
                break
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
