"""Classifies what a cook is doing from clips of different lengths, cut out of long videos held in memory."""

import argparse
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

VERBS = ("cut", "pour", "stir", "wash", "open", "peel")


@dataclass
class Config:
    videos: int = 8
    frames: int = 500
    size: int = 80
    segments: int = 480
    shortest: int = 4
    longest: int = 10
    batch: int = 6
    epochs: int = 3
    width: int = 12
    lr: float = 1e-3
    fixed: bool = False


class Kitchen(Dataset):
    """Segments (video, first frame, last frame, verb); an item is the uint8 frames T x 3 x H x W and the verb."""

    def __init__(self, config):
        self.config = config
        rng = np.random.default_rng(0)
        shape = config.frames, 3, config.size, config.size
        self.videos = [rng.integers(0, 160, shape, dtype=np.uint8) for _ in range(config.videos)]
        self.segments = []
        for _ in range(config.segments):
            length = int(rng.integers(config.shortest, config.longest + 1))
            video, first = int(rng.integers(config.videos)), int(rng.integers(config.frames - length))
            verb = int(rng.integers(len(VERBS)))
            self.videos[video][first : first + length, verb % 3, :: 2 + verb // 3] += 60
            self.segments.append((video, first, first + length, verb))

    def __len__(self):
        return len(self.segments)

    def __getitem__(self, index):
        video, first, last, verb = self.segments[index]
        frames = torch.from_numpy(self.videos[video])
        clip = frames[first:last]  # the cause
        if self.config.fixed:
            clip = clip.clone()
        return clip, verb


def collate_clips(items):
    clips, verbs = zip(*items)
    return list(clips), torch.tensor(verbs)  # the cause


class ClipNet(nn.Module):
    def __init__(self, width, verbs):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 5, stride=4, padding=2), nn.BatchNorm2d(width), nn.ReLU())
        self.body = nn.Sequential(
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU()
        )
        self.temporal = nn.GRU(2 * width, 2 * width, batch_first=True)
        self.head = nn.Linear(2 * width, verbs)

    def forward(self, clips):
        lengths = [len(clip) for clip in clips]
        frames = torch.cat(clips).float().div_(255.0)
        vectors = self.body(self.stem(frames)).mean((2, 3))
        packed = nn.utils.rnn.pack_sequence(vectors.split(lengths), enforce_sorted=False)
        _, last = self.temporal(packed)
        return self.head(last.squeeze(0))


class Trainer:
    def __init__(self, config):
        self.config = config
        self.loader = DataLoader(
            Kitchen(config),
            config.batch,
            shuffle=True,
            num_workers=1,
            collate_fn=collate_clips,
            persistent_workers=True,
        )
        self.model = ClipNet(config.width, len(VERBS))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr)
        self.step, self.right, self.seen = 0, 0, 0

    def train_step(self, clips, verbs):
        logits = self.model(clips)
        loss = F.cross_entropy(logits, verbs)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return logits.detach(), loss.detach()

    def fit(self):
        for epoch in range(self.config.epochs):
            for clips, verbs in self.loader:
                logits, loss = self.train_step(clips, verbs)
                if self.step % 20 == 0:
                    accuracy = (logits.argmax(1) == verbs).float().mean()
                    print(f"epoch {epoch} step {self.step} loss {loss:.4f} accuracy {accuracy:.2f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=Config.epochs)
    parser.add_argument("--segments", type=int, default=Config.segments)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    trainer = Trainer(Config(epochs=args.epochs, segments=args.segments, fixed=args.fixed))
    began = time.perf_counter()
    trainer.fit()
    print(f"{(time.perf_counter() - began) / trainer.step * 1e3:.2f} ms per step")
