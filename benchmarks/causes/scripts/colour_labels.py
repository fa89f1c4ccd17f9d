"""The colours of a mask become classes pixel by pixel, in Python. --fixed: one look-up in an array."""

import numpy as np
import torch
from clock import FIXED, Clock
from PIL import Image
from torch.utils.data import DataLoader, Dataset

COLOURS = [(255, 255, 255), (0, 0, 255), (0, 255, 255), (0, 255, 0), (255, 255, 0), (255, 0, 0)]
CLASSES = {colour: n for n, colour in enumerate(COLOURS)}
BITS = np.array([CLASSES.get((255 * (n >> 2), 255 * (n >> 1 & 1), 255 * (n & 1)), 0) for n in range(8)])


def mask(n):
    """Draw a mask of blocks in the six colours."""
    colours = np.array(COLOURS, np.uint8)[np.random.default_rng(n).integers(0, 6, (8, 8))]
    return Image.fromarray(colours.repeat(8, 0).repeat(8, 1))


class Segmentation(Dataset):
    def __init__(self):
        self.masks = [mask(n) for n in range(100)]
        self.images = torch.rand(100, 3, 64, 64)

    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        colours = np.asarray(self.masks[index % 100])
        if FIXED:
            labels = BITS[(colours > 0) @ np.array([4, 2, 1])]
        else:
            labels = np.zeros((64, 64), np.int64)
            for row in range(64):
                for column in range(64):
                    labels[row, column] = CLASSES[tuple(colours[row, column].tolist())]  # the cause
        return self.images[index % 100], torch.from_numpy(labels)


model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 6, 3, padding=1))
optimizer = torch.optim.Adam(model.parameters())
clock = Clock(200)
for x, y in DataLoader(Segmentation(), batch_size=8, shuffle=True):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
