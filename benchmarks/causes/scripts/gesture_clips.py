"""Recognises gestures in short recordings (motion JPEG), from a few frames of each. --fixed: the remedy."""

import io
import tempfile
from pathlib import Path

import numpy as np
import torch
from clock import FIXED, Clock
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

WIDTH, HEIGHT, FRAMES, TAKEN, CLIPS, GESTURES, BATCH, STEPS = 176, 144, 72, 8, 40, 6, 4, 70


def record(path, label, rng):
    """One recording: a disc that moves as its gesture wants, frame by frame as JPEG."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    noise = rng.normal(0, 12, (HEIGHT, WIDTH, 3))
    with path.open("wb") as file:
        for frame in range(FRAMES):
            angle = 0.1 * frame * (label + 1)
            disc = (x - 88 - 50 * np.cos(angle)) ** 2 + (y - 72 - 40 * np.sin(angle)) ** 2 < 400
            picture = np.clip(100 + noise + 120 * disc[..., None], 0, 255).astype(np.uint8)
            packet = io.BytesIO()
            Image.fromarray(picture).save(packet, "JPEG", quality=85)
            file.write(len(packet.getvalue()).to_bytes(4, "little") + packet.getvalue())


class Recording:
    def __init__(self, path):
        data, self.packets, place = path.read_bytes(), [], 0
        while place < len(data):
            size = int.from_bytes(data[place : place + 4], "little")
            self.packets.append(data[place + 4 : place + 4 + size])
            place += 4 + size

    def __len__(self):
        return len(self.packets)

    def frames(self, numbers):
        return np.stack([np.asarray(Image.open(io.BytesIO(self.packets[number]))) for number in numbers])


class UniformSubsample:
    def __init__(self, taken):
        self.taken = taken

    def indices(self, length):
        return torch.linspace(0, length - 1, self.taken).long()

    def __call__(self, frames):
        return frames[self.indices(len(frames))]


class Gestures(Dataset):
    def __init__(self, paths, labels):
        self.paths, self.labels, self.subsample = paths, labels, UniformSubsample(TAKEN)

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        recording = Recording(self.paths[index])
        if FIXED:
            clip = torch.from_numpy(recording.frames(self.subsample.indices(len(recording)).tolist()))
        else:
            clip = self.subsample(torch.from_numpy(recording.frames(range(len(recording)))))  # the cause
        clip = clip[:, ::2, ::2].permute(3, 0, 1, 2).float() / 127.5 - 1
        return clip, self.labels[index]


def block(inside, out):
    return nn.Sequential(nn.Conv3d(inside, out, 3, stride=(1, 2, 2), padding=1), nn.BatchNorm3d(out), nn.ReLU())


def main():
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        labels = rng.integers(GESTURES, size=CLIPS).tolist()
        paths = [Path(name) / f"{number:03}.mjpeg" for number in range(CLIPS)]
        for path, label in zip(paths, labels):
            record(path, label, rng)
        order = torch.Generator().manual_seed(0)
        loader = DataLoader(
            Gestures(paths, labels), BATCH, shuffle=True, num_workers=1, persistent_workers=True, generator=order
        )
        model = nn.Sequential(
            block(3, 8), block(8, 16), block(16, 32), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(32, GESTURES)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        clock, going = Clock(STEPS), True
        while going:
            for clip, label in loader:
                loss = nn.functional.cross_entropy(model(clip), label)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                going = clock.step()
                if not going:
                    break
        print(f"loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
