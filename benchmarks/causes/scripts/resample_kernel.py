"""The kernel that resamples a sound is computed anew for every sound. --fixed: once for each pair of rates."""

import functools
import math

import torch
from clock import FIXED, Clock
from torch.utils.data import DataLoader, Dataset


def kernel(source, target, width=6):
    """Compute the windowed sinc of every phase, for two rates without a common factor."""
    base = 0.99 * min(source, target)
    reach = math.ceil(width * source / base)
    times = torch.arange(-reach, reach + source, dtype=torch.float64) / source
    phases = []
    for phase in range(target):  # the cause
        t = ((times - phase / target) * base).clamp(-width, width)  # the cause
        window = torch.cos(t * math.pi / width / 2).square()  # the cause
        phases.append(torch.sinc(t) * window * base / source)  # the cause
    return torch.stack(phases).float()[:, None], reach


if FIXED:
    kernel = functools.cache(kernel)


def resample(sound, source, target):
    weights, reach = kernel(source, target)  # the cause
    padded = torch.nn.functional.pad(sound, (reach, reach + source))
    return torch.nn.functional.conv1d(padded[None], weights, stride=source)[0].T.reshape(-1)


class Sounds(Dataset):
    sounds = torch.rand(50, 1, 44_100)

    def __len__(self):
        return 5000

    def __getitem__(self, index):
        return resample(self.sounds[index % 50], 441, 160)[:16_000]  # the cause


model = torch.nn.Sequential(
    torch.nn.Conv1d(1, 64, 400, stride=160), torch.nn.ReLU(), torch.nn.Conv1d(64, 64, 5), torch.nn.ReLU(),
    torch.nn.AdaptiveAvgPool1d(1), torch.nn.Flatten(), torch.nn.Linear(64, 10),
)  # fmt: skip
optimizer = torch.optim.Adam(model.parameters())
clock = Clock(150)
for x in DataLoader(Sounds(), batch_size=4, shuffle=True):
    loss = model(x[:, None]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
