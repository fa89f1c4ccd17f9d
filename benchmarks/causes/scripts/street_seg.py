"""A segmentation network predicts each pixel of street scenes. --fixed: the remedy."""

import torch
from clock import FIXED, Clock
from torch import nn
from torch.nn import functional

torch.set_num_threads(2)  # no worker needs the other core

CLASSES, SIDE, BATCH = 8, 128, 4


class ConvNormAct(nn.Sequential):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )


class SegmentationHead(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.classify = nn.Conv2d(channels, classes, kernel_size=1)

    def forward(self, features, size):
        if FIXED:
            return functional.interpolate(self.classify(features), size=size, mode="bilinear", align_corners=False)
        features = functional.interpolate(features, size=size, mode="bilinear", align_corners=False)  # the cause
        return self.classify(features)  # the cause


class StreetNet(nn.Module):
    def __init__(self, channels=64):
        super().__init__()
        self.backbone = nn.Sequential(
            ConvNormAct(3, 16, 2), ConvNormAct(16, 32, 2), ConvNormAct(32, channels, 2), ConvNormAct(channels, channels)
        )
        self.head = SegmentationHead(channels, CLASSES)

    def forward(self, images):
        return self.head(self.backbone(images), images.shape[-2:])


def scenes(count=64):
    coarse = torch.randint(CLASSES, (count, 1, 8, 8))
    labels = functional.interpolate(coarse.float(), size=SIDE, mode="nearest").long().squeeze(1)
    colors = torch.rand(CLASSES, 3)
    return colors[labels].permute(0, 3, 1, 2) + 0.2 * torch.randn(count, 3, SIDE, SIDE), labels


def main():
    images, labels = scenes()
    model = StreetNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=200, power=0.9)
    clock = Clock(90)
    running = True
    while running:
        rows = torch.randint(len(images), (BATCH,))
        loss = functional.cross_entropy(model(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        running = clock.step()
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
