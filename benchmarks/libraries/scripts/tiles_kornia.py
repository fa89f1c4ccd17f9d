"""Classification of satellite tiles with kornia augmentations and a small residual network."""
import time

import kornia.augmentation as K
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

CLASSES = 6
SIZE = 64
BATCH = 32
EPOCHS = 5
WARMUP = 5


def make_tiles(count, seed):
    """Textures with a class-dependent frequency and colour."""
    gen = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=gen)
    axis = torch.linspace(0, 6.28, SIZE)
    yy, xx = torch.meshgrid(axis, axis, indexing="ij")
    freq = (labels + 1).float()[:, None, None]
    angle = torch.rand(count, generator=gen)[:, None, None] * 3.14
    wave = torch.sin(freq * (xx * angle.cos() + yy * angle.sin()))
    tint = torch.rand(count, 3, 1, 1, generator=gen) * 0.3
    image = 0.4 + 0.25 * wave[:, None] + tint + 0.1 * torch.randn(count, 3, SIZE, SIZE, generator=gen)
    return (image.clamp(0, 1) * 255).to(torch.uint8), labels


class TileDataset(Dataset):
    def __init__(self, images, labels, augment=None):
        self.images = images
        self.labels = labels
        self.augment = augment

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index].float() / 255
        if self.augment is not None:
            image = self.augment(image)[0]
        return image, self.labels[index]


class ResidualBlock(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.skip = nn.Conv2d(cin, cout, 1, stride=stride, bias=False)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.skip(x))


class TileNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            ResidualBlock(3, 24, 2), ResidualBlock(24, 48, 2), ResidualBlock(48, 96, 2)
        )
        self.fc = nn.Linear(96, CLASSES)

    def forward(self, x):
        return self.fc(self.layers(x).mean((2, 3)))


def main():
    torch.manual_seed(0)
    images, labels = make_tiles(960, seed=1)
    augment = K.AugmentationSequential(
        K.RandomHorizontalFlip(p=0.5),
        K.RandomVerticalFlip(p=0.5),
        K.RandomAffine(degrees=20.0, translate=(0.1, 0.1), p=0.7),
        K.ColorJiggle(0.2, 0.2, 0.2, 0.05, p=0.8),
        data_keys=["input"],
    )
    dataset = TileDataset(images, labels, augment)
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True, drop_last=True)

    model = TileNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    marks = []
    for epoch in range(EPOCHS):
        running = torch.zeros(())
        for tiles, target in loader:
            logits = model(tiles)
            loss = F.cross_entropy(logits, target, label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.detach()
            marks.append(time.perf_counter())
        print(f"epoch {epoch}: loss {running.item() / len(loader):.4f}")

    steps = torch.tensor(marks, dtype=torch.float64).diff()[WARMUP:]
    print(f"final loss {running.item() / len(loader):.4f}")
    print(f"{1000 * steps.mean().item():.1f} ms per step")


if __name__ == "__main__":
    main()
