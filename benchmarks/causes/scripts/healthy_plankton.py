"""Sorts pictures of plankton into species with a small residual network."""

import torch
import torch.nn.functional as F
from clock import Clock
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

SPECIES, SIZE, PICTURES, BATCH, STEPS = 8, 40, 2048, 32, 100


class Plankton(Dataset):
    """The pictures as bytes in one tensor; a whole batch is taken, flipped and scaled at once."""

    def __init__(self):
        self.labels = torch.randint(SPECIES, (PICTURES,))
        shapes = F.interpolate(torch.randn(SPECIES, 1, 5, 5), size=SIZE, mode="bilinear")
        noisy = 128 + 40 * shapes[self.labels] + 25 * torch.randn(PICTURES, 1, SIZE, SIZE)
        self.pictures = noisy.clamp(0, 255).to(torch.uint8)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, indices):
        pictures = self.pictures[indices].float().div_(127.5).sub_(1)
        flip = torch.rand(len(indices), 1, 1, 1) < 0.5
        return torch.where(flip, pictures.flip(-1), pictures), self.labels[indices]


class Residual(nn.Module):
    def __init__(self, inside, out, stride):
        super().__init__()
        self.first = nn.Conv2d(inside, out, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.one, self.two = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.skip = nn.Conv2d(inside, out, 1, stride, bias=False) if stride > 1 or inside != out else nn.Identity()

    def forward(self, x):
        h = F.relu(self.one(self.first(x)), inplace=True)
        return F.relu(self.two(self.second(h)) + self.skip(x), inplace=True)


def network(width=16):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        Residual(width, width, 1),
        Residual(width, 2 * width, 2),
        Residual(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, SPECIES),
    )


class Average:
    """Sums on the tensor's side; a number is asked for only when it is shown."""

    def __init__(self):
        self.total, self.count = torch.zeros(()), 0

    def add(self, value):
        self.total += value.detach()
        self.count += 1

    def take(self):
        mean = (self.total / self.count).item()
        self.total.zero_()
        self.count = 0
        return mean


def main():
    data = Plankton()
    sampler = BatchSampler(RandomSampler(data), BATCH, drop_last=True)
    loader = DataLoader(data, batch_size=None, sampler=sampler, num_workers=1, persistent_workers=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    clock, average, step, going = Clock(STEPS), Average(), 0, True
    while going:
        for pictures, labels in loader:
            step += 1
            loss = F.cross_entropy(model(pictures), labels, label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.add(loss)
            if step % 25 == 0:
                print(f"{step:4} loss {average.take():.4f}")
            going = clock.step()
            if not going:
                break


if __name__ == "__main__":
    main()
