"""Finds cell membranes on slices of microscopy, with elastic deformation of each slice. --fixed: the remedy."""

import torch
import torch.nn.functional as F
from clock import FIXED, Clock
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIZE, SLICES, BATCH, STEPS = 96, 160, 6, 80


def gaussian(size, sigma):
    x = torch.arange(size) - (size - 1) / 2
    kernel = torch.exp(-(x**2) / (2 * sigma**2))
    return kernel / kernel.sum()


class ElasticTransform:
    """Displaces every pixel by a smooth random field, the image and its mask alike."""

    def __init__(self, size=63, sigma=10.0, alpha=60.0):
        self.size, self.sigma, self.alpha = size, sigma, alpha
        line = torch.linspace(-1, 1, SIZE)
        self.grid = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1)[None]

    def smooth(self, noise):
        line = gaussian(self.size, self.sigma)
        half = self.size // 2
        noise = F.pad(noise, (half, half, half, half), mode="reflect")
        if FIXED:
            return F.conv2d(F.conv2d(noise, line.view(1, 1, -1, 1)), line.view(1, 1, 1, -1))
        return F.conv2d(noise, torch.outer(line, line)[None, None])  # the cause

    def __call__(self, image, mask, generator):
        noise = torch.rand(2, 1, SIZE, SIZE, generator=generator) * 2 - 1
        field = self.smooth(noise) * self.alpha / SIZE
        grid = self.grid + field[:, 0].permute(1, 2, 0)
        image = F.grid_sample(image[None], grid, align_corners=True, padding_mode="reflection")[0]
        mask = F.grid_sample(mask[None], grid, align_corners=True, mode="nearest", padding_mode="reflection")[0]
        return image, mask


class Slices(Dataset):
    def __init__(self, transform):
        self.transform = transform
        coarse = torch.randn(SLICES, 1, 12, 12)
        smooth = F.interpolate(coarse, size=SIZE, mode="bilinear")
        self.masks = (smooth.abs() < 0.2).float()
        self.images = smooth + 0.3 * torch.randn_like(smooth)

    def __len__(self):
        return BATCH * STEPS

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return self.transform(self.images[index % SLICES], self.masks[index % SLICES], generator)


class Net(nn.Module):
    def __init__(self, width=10):
        super().__init__()
        layers, inside = [], 1
        for dilation in (1, 2, 4, 1):
            layers += [nn.Conv2d(inside, width, 3, padding=dilation, dilation=dilation), nn.ReLU(inplace=True)]
            inside = width
        self.layers = nn.Sequential(*layers, nn.Conv2d(width, 1, 1))

    def forward(self, x):
        return self.layers(x)


def dice(logits, mask):
    p = logits.sigmoid()
    return 1 - (2 * (p * mask).sum() + 1) / (p.sum() + mask.sum() + 1)


def main():
    loader = DataLoader(Slices(ElasticTransform()), BATCH, num_workers=1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    clock = Clock(STEPS)
    for image, mask in loader:
        logits = model(image)
        loss = F.binary_cross_entropy_with_logits(logits, mask) + dice(logits, mask)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if not clock.step():
            break
    print(f"loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
