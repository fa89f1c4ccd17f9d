"""Detects bird species in clips annotated in long field recordings."""

import argparse
import tempfile
import time
import wave
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

RATE, CLIP_SECONDS, SPECIES = 16000, 1.0, 6


def record(root, files, seconds, seed=0):
    """Writes field recordings, and the table of what is heard when."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(files):
        sound = rng.normal(0, 300, int(seconds * RATE)).astype(np.float32)
        for start in rng.integers(0, seconds - 2, 50):
            species = int(rng.integers(SPECIES))
            t = np.arange(int(CLIP_SECONDS * RATE)) / RATE
            song = 2500 * np.sin(2 * np.pi * (900 + 700 * species + 200 * np.sin(2 * np.pi * 6 * t)) * t)
            sound[start * RATE : start * RATE + len(song)] += song
            rows.append((f"site_{number:02d}.wav", float(start), species))
        with wave.open(str(root / f"site_{number:02d}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE)
            file.writeframes(sound.clip(-32000, 32000).astype("<i2").tobytes())
    pd.DataFrame(rows, columns=["file", "start", "species"]).to_csv(root / "annotations.csv", index=False)


def load_audio(path, start=0.0, duration=None):
    """The samples of a recording as floats between -1 and 1, all of them or those from `start` on."""
    with wave.open(str(path), "rb") as file:
        file.setpos(int(start * file.getframerate()))
        count = file.getnframes() if duration is None else int(duration * file.getframerate())
        return np.frombuffer(file.readframes(count), dtype="<i2").astype(np.float32) / 32768  # the cause


class Clips(Dataset):
    def __init__(self, root, fixed):
        self.root, self.fixed = root, fixed
        table = pd.read_csv(root / "annotations.csv")
        self.files, self.starts = table["file"].tolist(), table["start"].tolist()
        self.species = torch.tensor(table["species"].to_numpy())

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        path, start = self.root / self.files[index], self.starts[index]
        if self.fixed:
            clip = load_audio(path, start, CLIP_SECONDS)
        else:
            audio = load_audio(path)  # the cause
            first = int(start * RATE)
            clip = audio[first : first + int(CLIP_SECONDS * RATE)]
        return torch.from_numpy(clip.copy()), self.species[index]


class SpectrogramNet(nn.Module):
    def __init__(self, n_fft=256, width=8):
        super().__init__()
        self.n_fft = n_fft
        self.register_buffer("window", torch.hann_window(n_fft))
        layers, inside = [], 1
        for out in (width, 2 * width, 4 * width):
            layers += [nn.Conv2d(inside, out, 3, stride=2, padding=1), nn.BatchNorm2d(out), nn.ReLU()]
            inside = out
        self.body, self.head = nn.Sequential(*layers), nn.Linear(inside, SPECIES)

    def forward(self, clips):
        spectrum = torch.stft(clips, self.n_fft, self.n_fft // 2, window=self.window, return_complex=True)
        image = (spectrum.abs() + 1e-5).log().unsqueeze(1)
        return self.head(self.body(image).mean((2, 3)))


def train(args, root):
    loader = DataLoader(Clips(root, args.fixed), args.batch, shuffle=True, num_workers=1, drop_last=True)
    model = SpectrogramNet()
    optimizer, criterion = torch.optim.Adam(model.parameters(), lr=2e-3), nn.CrossEntropyLoss()
    began, step = time.perf_counter(), 0
    for epoch in range(args.epochs):
        for clips, species in loader:
            loss = criterion(model(clips), species)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 20 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
    print(f"{(time.perf_counter() - began) / step * 1e3:.2f} ms per step")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        record(Path(folder), files=24, seconds=100)
        train(args, Path(folder))
