"""Predicts where pedestrians walk, from the tracks of a square's camera. --fixed: the remedy."""

import numpy as np
import pandas as pd
import torch
from clock import FIXED, Clock
from torch import nn
from torch.utils.data import DataLoader, Dataset

SEEN, AHEAD, MAX_PEOPLE, BATCH, STEPS = 8, 12, 12, 16, 80
WINDOW = SEEN + AHEAD


def annotations(people=900, length=60, frames=5000, seed=0):
    """The table of the camera: a line for each person in each frame."""
    rng = np.random.default_rng(seed)
    start = rng.integers(frames - length, size=people)
    velocity = rng.normal(0, 0.3, (people, 1, 2)) + rng.normal(0, 0.03, (people, length, 2))
    place = rng.uniform(0, 15, (people, 1, 2)) + velocity.cumsum(1)
    table = pd.DataFrame(
        {
            "frame": (start[:, None] + np.arange(length)).ravel(),
            "person": np.repeat(np.arange(people), length),
            "x": place[..., 0].ravel().astype(np.float32),
            "y": place[..., 1].ravel().astype(np.float32),
        }
    )
    return table.sort_values(["frame", "person"], ignore_index=True)


class Scenes(Dataset):
    """A scene: the people present in all frames of a window, in metres relative to their last seen place."""

    def __init__(self, table):
        self.table = table
        self.frames = {frame: self.columns(rows) for frame, rows in table.groupby("frame")} if FIXED else None
        seen = set(table["frame"])
        self.starts = [start for start in sorted(seen) if seen.issuperset(range(start, start + WINDOW))]

    @staticmethod
    def columns(rows):
        return rows["person"].to_numpy(), rows[["x", "y"]].to_numpy()

    def at(self, frame):
        if self.frames is not None:
            return self.frames[frame]
        return self.columns(self.table[self.table["frame"] == frame])  # the cause

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, index):
        start = self.starts[index]
        frames = [self.at(frame) for frame in range(start, start + WINDOW)]
        present = np.intersect1d(frames[0][0], frames[-1][0], assume_unique=True)[:MAX_PEOPLE]
        tracks = np.zeros((MAX_PEOPLE, WINDOW, 2), np.float32)
        for time, (people, places) in enumerate(frames):
            tracks[: len(present), time] = places[np.searchsorted(people, present)]
        tracks -= tracks[:, SEEN - 1 : SEEN].copy()
        mask = np.arange(MAX_PEOPLE) < len(present)
        return torch.from_numpy(tracks), torch.from_numpy(mask)


class Walker(nn.Module):
    def __init__(self, width=96, layers=2):
        super().__init__()
        self.inside = nn.Linear(SEEN * 2, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True, norm_first=True)
        self.social = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, AHEAD * 2)

    def forward(self, seen, mask):
        absent = torch.zeros(mask.shape).masked_fill(~mask, -1e4)
        h = self.social(self.inside(seen.flatten(2)), src_key_padding_mask=absent)
        return self.out(h).unflatten(2, (AHEAD, 2))


def main():
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(Scenes(annotations()), BATCH, shuffle=True, num_workers=1, generator=order, drop_last=True)
    model = Walker()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    clock = Clock(STEPS)
    for tracks, mask in loader:
        predicted = model(tracks[:, :, :SEEN], mask)
        error = (predicted - tracks[:, :, SEEN:]).norm(dim=-1).mean(-1)
        loss = (error * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not clock.step():
            break
    print(f"loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
