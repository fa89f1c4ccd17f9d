"""Outlines kidneys and lesions in patches of computed tomographies with a small network in three dimensions."""

import argparse
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Plan:
    volumes: int = 10
    side: int = 64
    patch: int = 24
    batch: int = 2
    width: int = 8
    steps: int = 180
    validate: int = 60
    classes: int = 3


def scans(plan, seed):
    """Noisy volumes with two bright ellipsoids, one of them with a darker ball inside, and their labels."""
    generator = torch.Generator().manual_seed(seed)
    axis = torch.linspace(-1, 1, plan.side)
    z, y, x = torch.meshgrid(axis, axis, axis, indexing="ij")
    images, labels = [], []
    for _ in range(plan.volumes):
        jitter = 0.1 * torch.randn(3, generator=generator)
        label = torch.zeros_like(x, dtype=torch.long)
        for sign in (-1, 1):
            shape = ((x - 0.5 * sign - jitter[0]) / 0.25) ** 2 + ((y - jitter[1]) / 0.4) ** 2 + (z / 0.6) ** 2
            label[shape < 1] = 1
        lesion = (x - 0.5 - jitter[0]) ** 2 + (y - jitter[1]) ** 2 + (z - jitter[2]) ** 2
        label[lesion < 0.03] = 2
        contrast = torch.tensor([0.0, 1.0, 0.5])[label]
        images.append(contrast + 0.3 * torch.randn(label.shape, generator=generator))
        labels.append(label.to(torch.uint8))
    return torch.stack(images), torch.stack(labels)


class PatchSampler:
    def __init__(self, images, labels, plan, seed=0):
        self.images, self.labels, self.plan = images, labels, plan
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self):
        p, room = self.plan.patch, self.plan.side - self.plan.patch + 1
        volumes = torch.randint(len(self.images), (self.plan.batch,), generator=self.generator).tolist()
        corners = torch.randint(room, (self.plan.batch, 3), generator=self.generator).tolist()
        cuts = [(v, slice(z, z + p), slice(y, y + p), slice(x, x + p)) for v, (z, y, x) in zip(volumes, corners)]
        image = torch.stack([self.images[cut] for cut in cuts]).unsqueeze(1)
        return image, torch.stack([self.labels[cut] for cut in cuts]).long()


def double(inside, out):
    return nn.Sequential(
        nn.Conv3d(inside, out, 3, padding=1, bias=False),
        nn.InstanceNorm3d(out, affine=True),
        nn.LeakyReLU(0.01),
        nn.Conv3d(out, out, 3, padding=1, bias=False),
        nn.InstanceNorm3d(out, affine=True),
        nn.LeakyReLU(0.01),
    )


class UNet(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.one, self.two, self.three = double(1, width), double(width, 2 * width), double(2 * width, 4 * width)
        self.up_two, self.up_one = (nn.ConvTranspose3d(n, n // 2, 2, stride=2) for n in (4 * width, 2 * width))
        self.back_two, self.back_one = double(4 * width, 2 * width), double(2 * width, width)
        self.head = nn.Conv3d(width, classes, 1)

    def forward(self, x):
        one = self.one(x)
        two = self.two(F.max_pool3d(one, 2))
        three = self.three(F.max_pool3d(two, 2))
        x = self.back_two(torch.cat([two, self.up_two(three)], dim=1))
        return self.head(self.back_one(torch.cat([one, self.up_one(x)], dim=1)))


def dice(probabilities, target, classes):
    one_hot = F.one_hot(target, classes).movedim(-1, 1).to(probabilities.dtype)
    overlap = (probabilities * one_hot).sum((0, 2, 3, 4))
    total = probabilities.sum((0, 2, 3, 4)) + one_hot.sum((0, 2, 3, 4))
    return (2 * overlap + 1) / (total + 1)


@torch.inference_mode()
def validate(model, images, labels, plan):
    model.eval()
    predicted = torch.cat([model(image[None, None]).softmax(1) for image in images[:1]])
    model.train()
    return dice(predicted, labels[:1].long(), plan.classes).tolist()


def main(plan):
    images, labels = scans(plan, seed=0)
    sampler = PatchSampler(images[1:], labels[1:], plan)
    model = UNet(plan.width, plan.classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.99, nesterov=True, weight_decay=3e-5)
    decay = torch.optim.lr_scheduler.PolynomialLR(optimizer, plan.steps, power=0.9)
    began = time.perf_counter()
    for step in range(1, plan.steps + 1):
        image, label = sampler.draw()
        logits = model(image)
        loss = F.cross_entropy(logits, label) + 1 - dice(logits.softmax(1), label, plan.classes)[1:].mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 12)
        optimizer.step()
        decay.step()
        if step % 25 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        if step % plan.validate == 0:
            print("dice " + " ".join(f"{d:.3f}" for d in validate(model, images, labels, plan)), flush=True)
    print(f"{(time.perf_counter() - began) / plan.steps * 1e3:.2f} ms per step")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=Plan.steps)
    parser.add_argument("--width", type=int, default=Plan.width)
    args = parser.parse_args()
    torch.manual_seed(0)
    main(Plan(steps=args.steps, width=args.width))
