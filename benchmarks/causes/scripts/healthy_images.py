"""Small pictures, decoded by a worker faster than the network needs them. Nothing is known to be wrong with it."""

import io
import time

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

STEPS, WARM = 120, 10


def encoded(n):
    """Encode a picture as JPEG."""
    coarse = np.random.default_rng(n).integers(0, 255, (8, 8, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(coarse).resize((64, 64), Image.Resampling.BICUBIC).save(buffer, "jpeg", quality=90)
    return buffer.getvalue()


class Pictures(Dataset):
    def __init__(self, files, length=20_000):
        self.files, self.length = files, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        number = index % len(self.files)
        pixels = torch.from_numpy(np.array(Image.open(io.BytesIO(self.files[number]))))
        x = pixels.permute(2, 0, 1)
        if torch.rand(()) < 0.5:
            x = x.flip(2)
        top, left = torch.randint(0, 9, (2,)).tolist()
        return x[:, top : top + 56, left : left + 56].contiguous(), number % 10


def unit(inputs, outputs, stride):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


def network():
    return nn.Sequential(
        unit(3, 32, 2), unit(32, 64, 1), unit(64, 64, 2), unit(64, 128, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(128, 10),
    )  # fmt: skip


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the worker has the other core
    data = Pictures([encoded(n) for n in range(64)])
    loader = DataLoader(
        data, batch_size=32, shuffle=True, num_workers=1, persistent_workers=True, drop_last=True, prefetch_factor=4
    )
    model = network().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS)
    began = 0.0
    for step, (x, y) in enumerate(loader, start=1):
        x = x.float().div_(255).contiguous(memory_format=torch.channels_last)
        loss = nn.functional.cross_entropy(model(x), y, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step == WARM:
            began = time.perf_counter()
        if step % 40 == 0:
            print(f"step {step}: loss {loss.item():.3f}, rate {scheduler.get_last_lr()[0]:.4f}")
        if step == STEPS:
            break
    print(f"STEP_MS {(time.perf_counter() - began) / (STEPS - WARM) * 1e3:.3f}")


if __name__ == "__main__":
    main()
