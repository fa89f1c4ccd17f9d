"""A picture is blurred at full size and then made small. --fixed: made small first."""

import numpy as np
import torch
from clock import FIXED, Clock
from PIL import Image, ImageFilter
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    def __init__(self):
        self.image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (480, 640, 3), dtype=np.uint8))

    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        image = self.image.rotate(0)
        if FIXED:
            image = image.resize((64, 64)).filter(ImageFilter.GaussianBlur(1))
        else:
            image = image.filter(ImageFilter.GaussianBlur(8))  # the cause
            image = image.resize((64, 64))
        return torch.from_numpy(np.asarray(image, np.float32)).permute(2, 0, 1) / 255


model = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 32, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
clock = Clock(60)
for x in DataLoader(Pictures(), batch_size=16, num_workers=1):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not clock.step():
        break
