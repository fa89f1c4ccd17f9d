"""Text to speech with a flow decoder: the alignment of phonemes to frames is searched in each step."""

import argparse
import math
import time

import numpy as np
import torch
from torch import nn

PHONEMES, MELS, WIDTH = 60, 40, 64


def search_alignment(scores, text_lengths, frame_lengths):
    """The monotonic path of the highest score through each (text, frames) table."""
    paths = np.zeros_like(scores)
    for b in range(len(scores)):  # the cause
        columns, rows = int(text_lengths[b]), int(frame_lengths[b])
        best = np.full((columns, rows), -1e9, dtype=np.float32)
        for y in range(rows):  # the cause
            for x in range(max(0, columns + y - rows), min(columns, y + 1)):  # the cause
                stay = best[x, y - 1] if y > x else -1e9  # the cause
                advance = (best[x - 1, y - 1] if x > 0 else -1e9) if y > 0 else 0.0  # the cause
                best[x, y] = scores[b, x, y] + max(stay, advance)  # the cause
        x = columns - 1
        for y in range(rows - 1, -1, -1):
            paths[b, x, y] = 1
            if x > 0 and (x == y or best[x, y - 1] < best[x - 1, y - 1]):
                x -= 1
    return paths


def search_alignment_of_batch(scores, text_lengths, frame_lengths):
    """The same search, a frame at a time for all rows of the batch and of the text."""
    size, columns, rows = scores.shape
    best = np.full((rows, size, columns), -1e9, dtype=np.float32)
    best[0, :, 0] = scores[:, 0, 0]
    for y in range(1, rows):
        advance = np.pad(best[y - 1, :, :-1], ((0, 0), (1, 0)), constant_values=-1e9)
        best[y] = np.maximum(scores[:, :, y] + np.maximum(best[y - 1], advance), -1e9)
    paths = np.zeros_like(scores)
    batch, x = np.arange(size), text_lengths - 1
    for y in range(rows - 1, -1, -1):
        inside = y < frame_lengths
        paths[batch[inside], x[inside], y] = 1
        if y:
            back = (x > 0) & ((x == y) | (best[y - 1, batch, x] < best[y - 1, batch, np.maximum(x - 1, 0)]))
            x = x - (inside & back)
    return paths


class Coupling(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(MELS // 2, WIDTH, 3, padding=1), nn.ReLU(), nn.Conv1d(WIDTH, MELS, 3, padding=1)
        )
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x, mask):
        kept, changed = x.chunk(2, 1)
        shift, scale = self.net(kept).mul(mask).chunk(2, 1)
        scale = scale.tanh()
        return torch.cat([changed * scale.exp() + shift, kept], 1) * mask, scale.sum((1, 2))


class FlowVoice(nn.Module):
    def __init__(self, search):
        super().__init__()
        self.search = search
        self.embed = nn.Embedding(PHONEMES, WIDTH)
        self.encoder = nn.Sequential(
            nn.Conv1d(WIDTH, WIDTH, 5, padding=2), nn.ReLU(), nn.Conv1d(WIDTH, MELS, 5, padding=2)
        )
        self.flow = nn.ModuleList(Coupling() for _ in range(6))

    def forward(self, text, text_lengths, mels, frame_lengths):
        mask = (torch.arange(mels.shape[2]) < frame_lengths[:, None])[:, None].float()
        means = self.encoder(self.embed(text).transpose(1, 2))
        latent, logdet = mels * mask, 0.0
        for step in self.flow:
            latent, change = step(latent, mask)
            logdet = logdet + change
        with torch.no_grad():
            scores = (
                means.transpose(1, 2) @ latent - 0.5 * (means**2).sum(1)[..., None] - 0.5 * (latent**2).sum(1)[:, None]
            )
            path = torch.from_numpy(self.search(scores.numpy(), text_lengths.numpy(), frame_lengths.numpy()))
        aligned = means @ path
        energy = 0.5 * (((latent - aligned) * mask) ** 2).sum((1, 2)) - logdet
        return (energy / (frame_lengths * MELS)).mean() + 0.5 * math.log(2 * math.pi)


def draw_batch(size, generator):
    text_lengths = torch.randint(24, 37, (size,), generator=generator)
    frame_lengths = text_lengths * 4 + torch.randint(0, 20, (size,), generator=generator)
    text = torch.randint(PHONEMES, (size, int(text_lengths.max())), generator=generator)
    where = (torch.arange(int(frame_lengths.max())) * text_lengths[:, None] // frame_lengths[:, None]).clamp(
        max=text.shape[1] - 1
    )
    tone = text.gather(1, where).float()[:, None] / PHONEMES
    mels = torch.sin(tone * torch.arange(1, MELS + 1)[:, None]) + 0.1 * torch.randn(
        size, MELS, where.shape[1], generator=generator
    )
    return text, text_lengths, mels, frame_lengths


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=110)
    args = parser.parse_args()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = FlowVoice(search_alignment_of_batch if args.fixed else search_alignment)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for step in range(args.steps):
        if step == 10:
            start = time.perf_counter()
        loss = model(*draw_batch(24, generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{(time.perf_counter() - start) / (args.steps - 10) * 1e3:.2f} ms per step")
    print(f"loss {loss.item():.6f}")
