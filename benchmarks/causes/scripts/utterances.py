"""Recognises spoken commands: a chain of generators turns a manifest of recordings into batches of log-mel frames."""

import argparse
import json
import random
import tempfile
import time
import wave
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

RATE, WINDOW, HOP, MELS, COMMANDS = 16000, 400, 160, 40, 12
MAX_FRAMES = 250


def write_corpus(root, count, seed=0):
    rng = np.random.default_rng(seed)
    with open(root / "train.jsonl", "w") as manifest:
        for number in range(count):
            seconds = rng.uniform(1.0, 2.4) if rng.random() < 0.5 else rng.uniform(4.0, 9.0)
            command = int(rng.integers(COMMANDS))
            t = np.arange(int(seconds * RATE)) / RATE
            sound = 4000 * np.sin(2 * np.pi * (300 + 120 * command) * t) + rng.normal(0, 900, len(t))
            path = root / f"{number:05d}.wav"
            with wave.open(str(path), "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(RATE)
                file.writeframes(sound.astype("<i2").tobytes())
            manifest.write(json.dumps({"wav": str(path), "samples": len(t), "command": command}) + "\n")


def mel_matrix(bins=257):
    mel = np.linspace(0, 2595 * np.log10(1 + RATE / 2 / 700), MELS + 2)
    edges = 700 * (10 ** (mel / 2595) - 1) / (RATE / 2) * (bins - 1)
    k = np.arange(bins)[:, None]
    up, down = (k - edges[:-2]) / (edges[1:-1] - edges[:-2]), (edges[2:] - k) / (edges[2:] - edges[1:-1])
    return torch.tensor(np.clip(np.minimum(up, down), 0, None), dtype=torch.float32)


def frames_of(samples):
    return 1 + (samples - WINDOW) // HOP


def shuffled_manifest(path, epoch):
    with open(path) as file:
        rows = [json.loads(line) for line in file]
    random.Random(epoch).shuffle(rows)
    yield from rows


def with_audio(rows):
    for row in rows:
        with wave.open(row["wav"], "rb") as file:
            audio = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2").astype(np.float32) / 32768
        yield {**row, "audio": torch.from_numpy(audio)}


def with_fbank(rows, mel=mel_matrix(), window=torch.hann_window(WINDOW)):
    for row in rows:
        audio = row.pop("audio")
        audio = audio - 0.97 * torch.cat([audio[:1], audio[:-1]])
        frames = audio.unfold(0, WINDOW, HOP) * window
        power = torch.fft.rfft(frames, 512).abs().square()
        feats = (power @ mel + 1e-6).log()
        yield {**row, "feats": feats - feats.mean(0)}


def short_enough(rows):
    for row in rows:
        frames = len(row["feats"]) if "feats" in row else frames_of(row["samples"])
        if 10 < frames <= MAX_FRAMES:
            yield row


def batched(rows, size):
    batch = []
    for row in rows:
        batch.append(row)
        if len(batch) == size:
            feats = nn.utils.rnn.pad_sequence([r["feats"] for r in batch], batch_first=True)
            lengths = torch.tensor([len(r["feats"]) for r in batch])
            yield feats, lengths, torch.tensor([r["command"] for r in batch])
            batch = []


class Pipeline(IterableDataset):
    def __init__(self, manifest, batch, epochs, fixed):
        self.manifest, self.batch, self.epochs, self.fixed = manifest, batch, epochs, fixed

    def __iter__(self):
        for epoch in range(self.epochs):
            rows = shuffled_manifest(self.manifest, epoch)
            if self.fixed:
                rows = with_fbank(with_audio(short_enough(rows)))
            else:
                rows = short_enough(with_fbank(with_audio(rows)))  # the cause
            yield from batched(rows, self.batch)


class Commands(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(MELS, width, 5, stride=3, padding=2), nn.ReLU())
        self.rnn, self.head = nn.GRU(width, width, batch_first=True), nn.Linear(width, COMMANDS)

    def forward(self, feats, lengths):
        states, _ = self.rnn(self.conv(feats.transpose(1, 2)).transpose(1, 2))
        last = ((lengths - 1) // 3).view(-1, 1, 1).expand(-1, 1, states.shape[2])
        return self.head(states.gather(1, last).squeeze(1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--recordings", type=int, default=600)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder), args.recordings)
        dataset = Pipeline(Path(folder) / "train.jsonl", 16, args.epochs, args.fixed)
        model, criterion = Commands(), nn.CrossEntropyLoss()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        step, began = 0, time.perf_counter()
        for feats, lengths, commands in DataLoader(dataset, batch_size=None, num_workers=1):
            loss = criterion(model(feats, lengths), commands)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 25 == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)
        print(f"{(time.perf_counter() - began) / step * 1e3:.2f} ms per step")
